"""Export and import of definitions."""

from __future__ import annotations

from convoymq.edges.http import definitions
from convoymq.edges.http.call import DONE, Call, Status
from convoymq.edges.http.routes import Routes
from convoymq.edges.http.served import LARGE_BODY_BYTES_MAX
from convoymq.model.json import JsonObject

routes = Routes()


@routes.add("GET", "definitions")
@routes.add("GET", "all-configuration")
async def get_definitions(call: Call) -> JsonObject:
    call.need(call.is_administrator)
    return definitions.export(call.broker)


@routes.add("POST", "definitions")
@routes.add("POST", "all-configuration")
async def post_definitions(call: Call) -> JsonObject | Status:
    call.need(call.is_administrator)
    return await _take(call, None)


@routes.add("GET", "definitions/{vhost}")
async def get_definitions_of(call: Call) -> JsonObject:
    call.need(call.is_administrator)
    return definitions.export(call.broker, call.vhost())


@routes.add("POST", "definitions/{vhost}")
async def post_definitions_of(call: Call) -> JsonObject | Status:
    call.need(call.is_administrator)
    return await _take(call, call.vhost())


async def _take(call: Call, vhost: str | None) -> JsonObject | Status:
    document = await call.json(LARGE_BODY_BYTES_MAX, form=True)
    if call.flag("dry_run"):
        found = await definitions.examine(call.broker, document, vhost)
        return found.to_builtins()
    skips = call.flag("skip_unsupported")
    left_out = await definitions.load(
        call.broker, document, vhost, user=call.user.name, skips=skips
    )
    return {"left_out": left_out} if skips else Status(DONE)
