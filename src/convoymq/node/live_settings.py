"""Changes of a running node: its configuration read again, its log, certificates, the secret.

| keys | what a reload does |
|---|---|
| `log.level` | lines below it are left out from now on |
| `vm_memory_high_watermark.*`, `disk_free_limit.absolute` | alarms follow the new limits |
| `cluster.secret`, `.secret_file`, `.accepted_secret_file` | links that begin from now on use them; the files are read again in any case |
| files of certificates | read again |
| all others | named: they need a restart |
"""  # noqa: E501

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from convoymq.broker.alarms import Watermarks
from convoymq.edges import configuration
from convoymq.model.errors import BrokerError, PreconditionFailed
from convoymq.model.json import JsonObject
from convoymq.node import logs
from convoymq.node.resources import watermarks
from convoymq.transport.credentials import read_secrets

if TYPE_CHECKING:
    from convoymq.model.config import Config
    from convoymq.transport.admission import Admission

LIMITS = frozenset((
    "vm_memory_high_watermark.relative", "vm_memory_high_watermark.absolute",
    "disk_free_limit.absolute",
))  # fmt: skip
SECRETS = frozenset(("cluster.secret", "cluster.secret_file", "cluster.accepted_secret_file"))
LIVE = LIMITS | SECRETS | {"log.level"}
"""Keys that need no restart."""


class LiveSettings:
    """See the module text. One per node.

    Args:
        load: reads the configuration again, from where it came; None: it came from nowhere.
        marks: thresholds of the alarms.
        admission: returns the links' admission.
    """

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config] | None,
        *,
        marks: Watermarks,
        output: logs.LogOutput,
        admission: Callable[[], Admission],
    ) -> None:
        self._load = load
        self._marks = marks
        self._output = output
        self.audit: logs.LogOutput | None = None
        """File of administrative acts, once it is open."""
        self._admission = admission
        self._log = structlog.get_logger().bind(node=config.node.id)
        self._in_force = _values(config)

    def on_hangup(self) -> None:
        """SIGHUP: the log goes on in a new file, and everything is read again."""
        self.reopen_log()
        if self._load is None:
            self.renew_tls()
            return
        try:
            self.reload()
        except BrokerError:
            # It is logged.
            return

    def reload(self) -> JsonObject:
        """Reads the configuration again and applies what can be applied. Returns the changed keys
        that are `applied`, and those that need a `restart`. Raises BrokerError: the configuration
        cannot be used, and nothing was changed."""
        if self._load is None:
            raise PreconditionFailed("the node has no configuration that can be read again")
        try:
            config = self._load()
            secrets = read_secrets(config.cluster)
        except BrokerError as error:
            self._log.error("config.not_reloaded", reason=error.text)
            raise PreconditionFailed(f"the configuration was not reloaded: {error.text}") from None
        found = _values(config)
        changed = [name for name, value in found.items() if value != self._in_force[name]]
        applied = [name for name in changed if name in LIVE]
        restart = [name for name in changed if name not in LIVE]
        self._in_force |= {name: found[name] for name in applied}
        if not LIMITS.isdisjoint(applied):
            marks = watermarks(config)
            self._marks.memory, self._marks.disk = marks.memory, marks.disk
        if "log.level" in applied:
            logs.set_level(config.log.level)
        self._admission().secrets = secrets
        self.renew_tls()
        self._log.info("config.reloaded", applied=applied, restart=restart)
        return {"applied": applied, "restart": restart}

    def set_log_level(self, level: str) -> None:
        """Leaves out lines below a level until the next start."""
        logs.set_level(level)
        self._log.info("log.level_changed", level=level)

    def reopen_log(self) -> None:
        """Opens the log files again, which were moved away: new ones get their names."""
        for output in filter(None, (self._output, self.audit)):
            try:
                output.reopen()
            except OSError as error:
                self._log.error("log.not_reopened", file=output.path, reason=str(error))
            else:
                self._log.info("log.reopened", file=output.path)

    def renew_tls(self) -> None:
        """Takes certificates that were written since."""
        tls = sys.modules.get("convoymq.transport.tls")
        if tls is None:
            return
        for file, error in tls.renew():
            if error is None:
                self._log.info("tls.renewed", file=file)
            else:
                self._log.error("tls.not_renewed", file=file, reason=str(error))


def _values(config: Config) -> dict[str, object]:
    """Returns the values of all keys, by their names."""
    keys = configuration.keys()
    return {
        key.name: getattr(keys.part(config, section), field)
        for (section, field), key in keys.table.items()
    }
