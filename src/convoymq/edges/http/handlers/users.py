"""Users."""

from __future__ import annotations

from convoymq.broker.access import HTTP
from convoymq.broker.changes import SHA256, DeleteUser, PutUser, hash_sha256
from convoymq.edges.http import resources
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.call import (
    DONE,
    Call,
    Status,
    change,
    done,
    object_not_found,
    put_status,
)
from convoymq.edges.http.fields import tags_of, text_in
from convoymq.edges.http.routes import Routes
from convoymq.model.errors import AccessRefused
from convoymq.model.json import JsonObject

routes = Routes()


@routes.listing("users")
async def users(call: Call) -> list[JsonObject]:
    call.need(call.is_administrator)
    users = call.broker.tree.users
    return [resources.user_row(user, users.limits_of(user.name)) for user in users.all()]


@routes.listing("users/without-permissions")
async def users_without_permissions(call: Call) -> list[JsonObject]:
    allowed = {user for (user, _), _ in call.broker.tree.users.permissions()}
    return [row for row in await users(call) if row["name"] not in allowed]


@routes.add("GET", "users/{user}")
async def user(call: Call) -> JsonObject:
    call.need(call.is_administrator)
    users = call.broker.tree.users
    found = users.find(call.path["user"])
    if found is None:
        raise object_not_found()
    return resources.user_row(found, users.limits_of(found.name))


@routes.add("PUT", "users/{user}")
async def put_user(call: Call) -> Status:
    call.need(call.is_administrator)
    body = await call.json()
    if "tags" not in body:
        raise bad_request("key tags is missing")
    algorithm = text_in(body, "hashing_algorithm", SHA256)
    if body.get("password"):
        password_hash, algorithm = hash_sha256(text_in(body, "password").encode()), SHA256
    else:
        password_hash = text_in(body, "password_hash", "")
    command = PutUser(
        name=call.path["user"],
        password_hash=password_hash,
        algorithm=algorithm,
        tags=tags_of(body["tags"]),
    )
    return put_status(await change(call, command))


@routes.add("DELETE", "users/{user}")
async def delete_user(call: Call) -> Status:
    await user(call)
    return await done(call, DeleteUser(name=call.path["user"]))


@routes.add("POST", "users/bulk-delete")
async def delete_users(call: Call) -> Status:
    call.need(call.is_administrator)
    names = (await call.json()).get("users")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise bad_request("key users is not a list of names")
    for name in names:
        await change(call, DeleteUser(name=name))
    return Status(DONE)


@routes.add("POST", "convoy/users/{user}/authenticate")
async def authenticate(call: Call) -> JsonObject:
    """Tries a password, as `rabbitmqctl authenticate_user` does."""
    call.need(call.is_administrator)
    password = text_in(await call.json(), "password")
    try:
        await call.broker.access.authenticate(
            call.path["user"], password.encode(), "localhost", protocol=HTTP
        )
    except AccessRefused:
        return {"authenticated": False}
    return {"authenticated": True}


@routes.listing("users/{user}/permissions")
async def user_permissions(call: Call) -> list[JsonObject]:
    await user(call)
    rows = resources.permissions(call.broker)
    return [row for row in rows if row["user"] == call.path["user"]]


@routes.listing("users/{user}/topic-permissions")
async def user_topic_permissions(call: Call) -> list[JsonObject]:
    await user(call)
    rows = resources.topic_permissions(call.broker)
    return [row for row in rows if row["user"] == call.path["user"]]
