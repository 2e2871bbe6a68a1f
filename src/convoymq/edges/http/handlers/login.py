"""Log-in of browsers: a session with a cookie."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from convoymq.edges.http.authentication import check_origin
from convoymq.edges.http.call import DONE, Call
from convoymq.edges.http.fields import text_in
from convoymq.edges.http.routes import Routes
from convoymq.edges.http.sessions import Session
from convoymq.edges.sasl import Credentials
from convoymq.model.json import JsonObject

routes = Routes()


@routes.add("POST", "login")
async def log_in(call: Call) -> Response:
    """Opens a session for a name and password. The answer has the token that requests need which
    change something."""
    check_origin(call.request)
    body = await call.bodies.read_fields(call.request)
    given = Credentials(text_in(body, "username"), text_in(body, "password").encode())
    call.user = await call.authentication.log_in(call.request, given)
    call.request.state.user = call.user.name
    session, cookie = call.authentication.begin(call.request, call.user)
    return JSONResponse(_row(call, session), headers=cookie)


@routes.add("GET", "login")
async def login(call: Call) -> JsonObject:
    """Describes the user of the request and the session, if it has one."""
    return _row(call, call.authentication.session_of(call.request))


@routes.add("DELETE", "login")
async def log_out(call: Call) -> Response:
    """Ends the session."""
    return Response(status_code=DONE, headers=call.authentication.end(call.request))


def _row(call: Call, session: Session | None) -> JsonObject:
    row: JsonObject = {
        "name": call.user.name,
        "tags": list(call.user.tags),
        "is_administrator": call.is_administrator,
        "is_monitor": call.is_monitor,
        "vhosts": sorted(call.visible),
    }
    if session is not None:
        left_s = call.authentication.sessions.left_s(session)
        row |= {"csrf": session.csrf, "expires_in_s": left_s}
    return row
