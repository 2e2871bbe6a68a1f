"""The server side of the columnar protocol (docs/formats/columnar-protocol.md)."""
