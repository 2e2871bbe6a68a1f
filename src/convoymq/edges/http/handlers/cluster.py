"""The cluster: overview, versions, name, and what every installation is asked for."""

from __future__ import annotations

from convoymq.broker.changes import CLUSTER_NAME, hash_sha256, set_global_parameter
from convoymq.edges.http import resources
from convoymq.edges.http.bodies import bad_request
from convoymq.edges.http.call import DONE, Call, Status, done, object_not_found
from convoymq.edges.http.fields import text_in
from convoymq.edges.http.rabbitmq_flags import flag_rows
from convoymq.edges.http.routes import Routes
from convoymq.model.compatibility import COMPATIBLE_VERSION
from convoymq.model.json import JsonObject

routes = Routes()


@routes.add("GET", "overview")
async def overview(call: Call) -> JsonObject:
    return await resources.overview(call.broker, call.rates, call.visible, call.ranges)


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
    return await done(call, set_global_parameter(CLUSTER_NAME, name))


async def none_here(call: Call) -> list[JsonObject]:
    """Returns no rows: tools ask for parts of federation and the stream protocol."""
    if "vhost" in call.path:
        call.vhost()
    return []


for absent in ("federation-links", "stream/connections", "stream/consumers", "stream/publishers"):
    routes.listing(absent)(none_here)
    routes.listing(f"{absent}/{{vhost}}")(none_here)


@routes.add("GET", "extensions")
async def extensions(call: Call) -> list[JsonObject]:
    return []


@routes.add("GET", "auth")
async def auth(call: Call) -> JsonObject:
    return {"oauth_enabled": False}


@routes.add("GET", "auth/hash_password/{password}")
async def hash_password(call: Call) -> JsonObject:
    """Returns a hash that `password_hash` of a user takes here and in RabbitMQ."""
    call.need(call.is_administrator)
    return {"ok": hash_sha256(call.path["password"].encode())}


@routes.listing("auth/attempts/{node}")
async def auth_attempts(call: Call) -> list[JsonObject]:
    """Log-ins by protocol, of this node."""
    _check_own_node(call)
    logins = call.broker.access.logins
    return [
        {
            "protocol": protocol,
            "auth_attempts": logins[protocol, True] + logins[protocol, False],
            "auth_attempts_failed": logins[protocol, False],
            "auth_attempts_succeeded": logins[protocol, True],
        }
        for protocol in sorted({protocol for protocol, _ in logins})
    ]


@routes.add("DELETE", "auth/attempts/{node}")
async def forget_auth_attempts(call: Call) -> Status:
    """Counts anew from now on. Metrics go on."""
    _check_own_node(call)
    call.broker.access.logins.clear()
    return Status(DONE)


@routes.add("DELETE", "reset")
async def reset(call: Call) -> Status:
    """Forgets the samples that this node has: rates and histories begin anew."""
    call.need(call.is_administrator)
    call.broker.cluster.model.forget_histories()
    return Status(DONE)


@routes.add("DELETE", "reset/{node}")
async def reset_node(call: Call) -> Status:
    """As `reset`; the node must be the one that is asked."""
    _check_own_node(call)
    return await reset(call)


def _check_own_node(call: Call) -> None:
    """Administrators only. Raises 404 for a node that there is not, 400 for another one."""
    call.need(call.is_administrator)
    own, wanted = call.broker.node_name, call.path["node"]
    if wanted != own:
        if call.broker.tree.nodes.named(wanted) is None:
            raise object_not_found()
        raise bad_request(f"this is {own}: each node counts for itself")


@routes.listing("feature-flags")
async def feature_flags(call: Call) -> list[JsonObject]:
    """Lists the features that wait until every node supports them: the versions of the machines
    after their first. Those of queues are enabled when every queue of this node has them; where
    there is none, when every node of the cluster supports them. Behind them, RabbitMQ's own."""
    replicas = call.broker.replicas
    in_force = {
        kind: known.get("in_force_min", replicas.floor_of(kind))
        for kind, known in replicas.versions().items()
    }
    versions: list[JsonObject] = [
        {
            "name": f"{kind}_version_{version}",
            "desc": f"Version {version} of the rules of {kind}",
            "doc_url": "",
            "state": "enabled" if in_force[kind] >= version else "disabled",
            "stability": "stable",
            "provided_by": "convoymq",
        }
        for kind, known in replicas.versions().items()
        for version in range(2, known["newest"] + 1)
    ]
    return versions + flag_rows()


@routes.add("PUT", "feature-flags/{name}/enable")
async def enable_feature_flag(call: Call) -> Status:
    """Succeeds if every node supports the flag: then it is enabled, or will be by itself within
    moments. It cannot be forced."""
    call.need(call.is_administrator)
    for row in await feature_flags(call):
        if row["name"] == call.path["name"]:
            if row["state"] == "enabled":
                return Status(DONE)
            kind, _, version = str(row["name"]).rpartition("_version_")
            if call.broker.replicas.floor_of(kind) >= int(version):
                return Status(DONE)
            raise bad_request(
                f"{row['name']} is enabled by itself when all nodes support it "
                "(`convoy status` shows their releases)"
            )
    raise object_not_found()


@routes.listing("deprecated-features/used")
async def deprecated_features_used(call: Call) -> list[JsonObject]:
    """Lists the deprecated features that are in use now."""
    used = set()
    records = call.broker.tree.queues.all()
    if any(not record.durable and record.owner is None for record in records):
        used.add("transient_nonexcl_queues")
    channels = await call.broker.cluster.channels()
    if any(channel.row.get("global_prefetch_count") for channel in channels):
        used.add("global_qos")
    return [row for row in await deprecated_features(call) if row["name"] in used]


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
