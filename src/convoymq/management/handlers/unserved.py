"""What this release does not serve: policies, parameters, limits. Lists of it are empty;
changes are refused by name."""

from __future__ import annotations

from convoymq.management.bodies import bad_request
from convoymq.management.call import Call, object_not_found
from convoymq.management.json_values import JsonObject
from convoymq.management.routes import Routes

routes = Routes()


def _none_of(pattern: str, *, of_vhost: bool = False) -> None:
    """Registers a list of what is not served: always empty."""

    @routes.listing(pattern)
    async def listed(call: Call) -> list[JsonObject]:
        if of_vhost:
            call.vhost()
        return []


def _refuse(word: str, *patterns: str, readable: bool = True) -> None:
    """Registers paths that would change what is not served: refused by name. Who only asks whether
    there is one (`readable`) hears that there is none."""

    async def refused(call: Call) -> object:
        call.need("policymaker" in call.user.tags or call.is_administrator)
        raise bad_request(f"{word} are not served by this release")

    async def missing(call: Call) -> object:
        call.vhost()
        raise object_not_found()

    for pattern in patterns:
        for method in ("PUT", "DELETE"):
            routes.add(method, pattern)(refused)
        if readable:
            routes.add("GET", pattern)(missing)


for _path in ("policies", "operator-policies", "vhost-limits", "parameters"):
    _none_of(_path)
_none_of("user-limits")
_none_of("parameters/{component}")
for _path in ("policies/{vhost}", "operator-policies/{vhost}", "vhost-limits/{vhost}"):
    _none_of(_path, of_vhost=True)
_none_of("parameters/{component}/{vhost}", of_vhost=True)
_refuse("policies", "policies/{vhost}/{name}")
_refuse("operator policies", "operator-policies/{vhost}/{name}")
_refuse("parameters", "parameters/{component}/{vhost}/{name}")
_refuse("global parameters", "global-parameters/{name}", readable=False)
_refuse("limits of virtual hosts", "vhost-limits/{vhost}/{name}", readable=False)
_refuse("limits of users", "user-limits/{user}/{name}", readable=False)
