"""The cluster: overview, versions, name, and what every installation is asked for."""

from __future__ import annotations

from convoymq.management import resources
from convoymq.management.call import DONE, Call, Status, change, object_not_found
from convoymq.management.fields import text_in
from convoymq.management.handlers.nodes import machine_versions
from convoymq.management.routes import Routes
from convoymq.metadata.commands import PutSetting
from convoymq.model.compatibility import COMPATIBLE_VERSION
from convoymq.model.json import JsonObject

routes = Routes()


@routes.add("GET", "overview")
async def overview(call: Call) -> JsonObject:
    return await resources.overview(call.broker, call.rates, call.visible)


@routes.add("GET", "whoami")
async def whoami(call: Call) -> JsonObject:
    return {"name": call.user.name, "tags": list(call.user.tags)}


@routes.add("GET", "version")
async def version(call: Call) -> str:
    return COMPATIBLE_VERSION


@routes.add("GET", "cluster-name")
async def cluster_name(call: Call) -> JsonObject:
    return {"name": call.broker.cluster_name}


@routes.add("PUT", "cluster-name")
async def set_cluster_name(call: Call) -> Status:
    call.need(call.is_administrator)
    name = text_in(await call.json(), "name")
    await change(call, PutSetting(name="cluster_name", value=name))
    return Status(DONE)


@routes.add("GET", "extensions")
async def extensions(call: Call) -> list[JsonObject]:
    return []


@routes.add("GET", "auth")
async def auth(call: Call) -> JsonObject:
    return {"oauth_enabled": False}


@routes.listing("feature-flags")
async def feature_flags(call: Call) -> list[JsonObject]:
    """What waits until every node can do it: the versions of the machines after their first. Those
    of queues are enabled when every queue of this node has them."""
    return [
        {
            "name": f"{kind}_version_{version}",
            "desc": f"Version {version} of the rules of {kind}",
            "doc_url": "",
            "state": "enabled" if known.get("in_force_min", 0) >= version else "disabled",
            "stability": "stable",
            "provided_by": "convoymq",
        }
        for kind, known in machine_versions(call.broker).items()
        for version in range(2, known["newest"] + 1)
    ]


@routes.listing("deprecated-features")
async def deprecated_features(call: Call) -> list[JsonObject]:
    permitted = {
        "global_qos": call.broker.settings.permit_global_qos,
        "transient_nonexcl_queues": call.broker.settings.permit_transient_queues,
    }
    return [
        {
            "name": name,
            "desc": "",
            "deprecation_phase": "permitted_by_default",
            "provided_by": "convoymq",
            "doc_url": "",
            "state": "permitted" if permitted[name] else "denied",
        }
        for name in sorted(permitted)
    ]


@routes.listing("global-parameters")
async def global_parameters(call: Call) -> list[JsonObject]:
    return [{"name": "cluster_name", "value": call.broker.cluster_name}]


@routes.add("GET", "global-parameters/{name}")
async def global_parameter(call: Call) -> JsonObject:
    for row in await global_parameters(call):
        if row["name"] == call.path["name"]:
            return row
    raise object_not_found()
