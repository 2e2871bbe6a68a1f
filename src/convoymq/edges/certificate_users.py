"""Users that client certificates stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from convoymq.edges.edge import Certificate

_ATTRIBUTES = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "streetAddress": "STREET",
    "userId": "UID",
}


_ALTERNATIVES = {"dns": "DNS", "ip": "IP Address", "email": "email", "uri": "URI"}
"""Names that `ssl` gives to kinds of alternative names."""


def certificate_user(
    certificate: Certificate, source: str, san_type: str = "dns", san_index: int = 0
) -> str | None:
    """Returns the user that a verified peer certificate (as `ssl` decodes it) stands for.

    `source` is `common_name`; `subject_alternative_name`: the one with that index among those of a
    type; or `distinguished_name`: the subject as RFC 4514 writes it.
    """
    if source == "subject_alternative_name":
        kind = _ALTERNATIVES[san_type]
        pairs = cast("tuple[tuple[str, str], ...]", certificate.get("subjectAltName", ()))
        found = [value for name, value in pairs if name == kind]
        return found[san_index] if san_index < len(found) else None
    subject = certificate.get("subject", ())
    if source == "common_name":
        names = [str(value) for part in subject for key, value in part if key == "commonName"]
        return names[0] if names else None
    parts = [
        "+".join(f"{_ATTRIBUTES.get(key, key)}={_escaped(str(value))}" for key, value in part)
        for part in reversed(subject)
    ]
    return ",".join(parts) or None


def _escaped(value: str) -> str:
    text = "".join("\\" + char if char in '\\,+"<>;' else char for char in value)
    if text[:1] in ("#", " "):
        text = "\\" + text
    return text[:-1] + "\\ " if text.endswith(" ") and len(value) > 1 else text
