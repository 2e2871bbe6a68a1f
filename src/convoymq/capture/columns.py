"""Columns of MariaDB: one JSON for one value, whether a query or the binary log gives it.

    snapshot:    SELECT expression ──▶ Column.selected ─┐
                                                        ├─▶ raw value ──▶ Column.json
    binary log:  bytes of a row    ──▶ Column.logged   ─┘

Both ways end in the same raw value: the bytes of a text in the column's charset, the number of an
ENUM or SET, the address of an INET6. Only `Column.json` makes JSON of it. docs/capture.md has the
table of types.
"""

from __future__ import annotations

import base64
import codecs
import re
import struct
import uuid
from dataclasses import dataclass, replace
from datetime import date
from enum import Enum, auto

from convoymq.capture.binlog import BINARY_COLLATION, Cursor, MapColumn
from convoymq.capture.errors import CaptureError
from convoymq.model.json import Json

Raw = int | float | str | bytes


class Form(Enum):
    """Raw value and JSON of a type."""

    INTEGER = auto()
    DECIMAL = auto()
    FLOAT = auto()
    DOUBLE = auto()
    DATE = auto()
    TIME = auto()
    DATETIME = auto()
    TIMESTAMP = auto()
    TEXT = auto()
    BYTES = auto()
    ENUM = auto()
    SET = auto()
    UUID = auto()
    ADDRESS = auto()
    GEOMETRY = auto()


@dataclass(frozen=True, slots=True)
class Type:
    """A type of columns: its form, its code in the log, and how a query reads it."""

    form: Form
    code: int
    size: int = 0
    """Bytes in the log, or of the length before a value."""
    select: str = "{}"


def _geometry() -> dict[str, Type]:
    names = ("point", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon",
             "geometrycollection", "geometry")  # fmt: skip
    return {name: Type(Form.GEOMETRY, 255, 4, "CAST({} AS BINARY)") for name in names}


TYPES: dict[str, Type] = {
    "tinyint": Type(Form.INTEGER, 1, 1),
    "smallint": Type(Form.INTEGER, 2, 2),
    "mediumint": Type(Form.INTEGER, 9, 3),
    "int": Type(Form.INTEGER, 3, 4),
    "bigint": Type(Form.INTEGER, 8, 8),
    "bit": Type(Form.INTEGER, 16, select="{} + 0"),
    "year": Type(Form.INTEGER, 13, 1),
    "decimal": Type(Form.DECIMAL, 246),
    # As text a FLOAT has six digits, and FLOAT(7,3) three behind the point.
    "float": Type(Form.FLOAT, 4, 4, "{} * 1e0"),
    "double": Type(Form.DOUBLE, 5, 8, "{} * 1e0"),
    "date": Type(Form.DATE, 10, 3),
    "time": Type(Form.TIME, 19),
    "datetime": Type(Form.DATETIME, 18),
    "timestamp": Type(Form.TIMESTAMP, 17),
    "char": Type(Form.TEXT, 254, select="CAST({} AS BINARY)"),
    "varchar": Type(Form.TEXT, 15, select="CAST({} AS BINARY)"),
    "tinytext": Type(Form.TEXT, 252, 1, "CAST({} AS BINARY)"),
    "text": Type(Form.TEXT, 252, 2, "CAST({} AS BINARY)"),
    "mediumtext": Type(Form.TEXT, 252, 3, "CAST({} AS BINARY)"),
    "longtext": Type(Form.TEXT, 252, 4, "CAST({} AS BINARY)"),
    "binary": Type(Form.BYTES, 254),
    "varbinary": Type(Form.BYTES, 15),
    "tinyblob": Type(Form.BYTES, 252, 1),
    "blob": Type(Form.BYTES, 252, 2),
    "mediumblob": Type(Form.BYTES, 252, 3),
    "longblob": Type(Form.BYTES, 252, 4),
    "enum": Type(Form.ENUM, 247, select="CAST({} AS UNSIGNED)"),
    "set": Type(Form.SET, 248, select="CAST({} AS UNSIGNED)"),
    "uuid": Type(Form.UUID, 254, 16, "CAST({} AS BINARY(16))"),
    "inet6": Type(Form.ADDRESS, 254, 16, "CAST({} AS BINARY(16))"),
    "inet4": Type(Form.ADDRESS, 254, 4, "CAST({} AS BINARY(4))"),
    **_geometry(),
}
OWN_BYTES = ("uuid", "inet6", "inet4")
"""Types that are BINARY in the log."""
BY_CODE = {1: "tinyint", 2: "smallint", 3: "int", 4: "float", 5: "double", 8: "bigint",
           9: "mediumint", 10: "date", 14: "date", 13: "year", 16: "bit", 17: "timestamp",
           18: "datetime", 19: "time", 246: "decimal", 247: "enum", 248: "set",
           255: "geometry"}  # fmt: skip
BLOBS = {1: "tiny", 2: "", 3: "medium", 4: "long"}

CODECS = {
    "utf8mb4": "utf-8", "utf8mb3": "utf-8", "utf8": "utf-8", "ascii": "ascii", "latin1": "cp1252",
    "latin2": "iso8859-2", "latin5": "iso8859-9", "latin7": "iso8859-13", "greek": "iso8859-7",
    "hebrew": "iso8859-8", "cp1250": "cp1250", "cp1251": "cp1251", "cp1256": "cp1256",
    "cp1257": "cp1257", "cp850": "cp850", "cp852": "cp852", "cp866": "cp866", "koi8r": "koi8-r",
    "koi8u": "koi8-u", "macroman": "mac-roman", "macce": "mac-latin2", "tis620": "tis-620",
    "big5": "big5", "gbk": "gbk", "gb2312": "gb2312", "euckr": "euc-kr", "ujis": "euc-jp",
    "eucjpms": "euc-jp", "sjis": "shift-jis", "cp932": "cp932", "ucs2": "utf-16-be",
    "utf16": "utf-16-be", "utf16le": "utf-16-le", "utf32": "utf-32-be",
}  # fmt: skip
"""Python's codec of each charset that is served."""
UNKNOWN = "\ufffd"
LATIN1 = "".join(
    chr(byte) if (text := bytes([byte]).decode("cp1252", "replace")) == UNKNOWN else text
    for byte in range(256)
)
"""Of MariaDB: cp1252, whose five undefined bytes stand for themselves."""
MEMBER = re.compile(r"'((?:[^']|'')*)'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    name: str
    type: str
    """MariaDB's name of it, a key of `TYPES`."""
    unsigned: bool = False
    length: int = 0
    """Bytes at most of a text or of bytes, bits of a BIT, digits of a DECIMAL."""
    scale: int = 0
    """Digits behind the point: of a DECIMAL, of seconds."""
    charset: str = ""
    members: tuple[str, ...] = ()
    """Of an ENUM or a SET, in the order of the definition."""
    is_virtual: bool = False
    """The database computes the value and stores none: no part of a row here."""

    @property
    def expression(self) -> str:
        """Returns what a query selects."""
        return TYPES[self.type].select.format(quoted(self.name))

    # --- raw values --------------------------------------------------------------------------

    def selected(self, value: bytes | str | None) -> Raw | None:
        """Returns the raw value that a query gives for `expression`."""
        if value is None:
            return None
        form = TYPES[self.type].form
        if form in (Form.TEXT, Form.BYTES, Form.UUID, Form.ADDRESS, Form.GEOMETRY):
            data = value.encode() if isinstance(value, str) else value
            return data.rstrip(b" ") if self.type == "char" and self._is_narrow else data
        text = value if isinstance(value, str) else value.decode("ascii")
        match form:
            case Form.INTEGER | Form.ENUM | Form.SET:
                return int(text)
            case Form.FLOAT | Form.DOUBLE:
                return float(text)
            case Form.DECIMAL:
                return _plain(text)
            case Form.DATETIME:
                return text.replace(" ", "T")
            case Form.TIMESTAMP:
                return text.replace(" ", "T") + "Z"
        return text

    def logged(self, row: Cursor, meta: int) -> Raw:
        """Returns the raw value at the row's place. `meta`: of the table's map."""
        kind = TYPES[self.type]
        match kind.form:
            case Form.INTEGER if self.type == "bit":
                return int.from_bytes(row.take((meta >> 8) + (meta & 0xFF > 0)), "big")
            case Form.INTEGER if self.type == "year":
                return 1900 + year if (year := row.uint(1)) else 0
            case Form.INTEGER:
                signed = not self.unsigned
                return int.from_bytes(row.take(kind.size), "little", signed=signed)
            case Form.FLOAT:
                return float(struct.unpack("<f", row.take(4))[0])
            case Form.DOUBLE:
                return float(struct.unpack("<d", row.take(8))[0])
            case Form.DECIMAL:
                return _decimal(row, meta >> 8, meta & 0xFF)
            case Form.DATE:
                return _date(row.uint(3))
            case Form.TIME:
                return _time(row, meta)
            case Form.DATETIME:
                return _datetime(row, meta)
            case Form.TIMESTAMP:
                return _timestamp(row, meta)
            case Form.ENUM | Form.SET:
                return row.uint(meta)
        data = _bytes(row, kind.code, meta)
        if kind.code == 254 and kind.form is not Form.TEXT:
            # Zeros at the end are not logged.
            return data.ljust(kind.size or self.length, b"\0")
        return data.rstrip(b" ") if self.type == "char" and self._is_narrow else data

    @property
    def _is_narrow(self) -> bool:
        """Returns whether a space is one byte."""
        return self.charset not in ("ucs2", "utf16", "utf16le", "utf32")

    # --- JSON --------------------------------------------------------------------------------

    def json(self, raw: Raw | None) -> Json:
        """Returns a value's JSON."""
        if raw is None:
            return None
        match TYPES[self.type].form:
            case Form.FLOAT:
                assert isinstance(raw, float)
                return shortest(raw)
            case Form.TEXT:
                assert isinstance(raw, bytes)
                text = decoded(raw, self.charset)
                return text if self._is_narrow or self.type != "char" else text.rstrip(" ")
            case Form.BYTES:
                assert isinstance(raw, bytes)
                return base64.b64encode(raw).decode()
            case Form.ENUM:
                assert isinstance(raw, int)
                # 0 is MariaDB's mark of a value that was none of the members.
                return self.members[raw - 1] if raw else ""
            case Form.SET:
                assert isinstance(raw, int)
                chosen = [name for bit, name in enumerate(self.members) if raw >> bit & 1]
                return ",".join(chosen)
            case Form.UUID:
                assert isinstance(raw, bytes)
                return str(uuid.UUID(bytes=raw))
            case Form.ADDRESS:
                assert isinstance(raw, bytes)
                return address(raw)
            case Form.GEOMETRY:
                assert isinstance(raw, bytes)
                srid = int.from_bytes(raw[:4], "little")
                return {"srid": srid, "wkb": base64.b64encode(raw[4:]).decode()}
        assert not isinstance(raw, bytes)
        return raw

    # --- the log's definition ----------------------------------------------------------------

    def fits(self, logged: MapColumn) -> bool:
        """Returns whether a table's map, without names, has a column of this type here."""
        kind = TYPES[self.type]
        # 14: a DATE as older servers log it.
        if logged.code != kind.code and (logged.code, kind.code) != (14, 10):
            return False
        match kind.form:
            case Form.DECIMAL:
                return logged.meta == self.length << 8 | self.scale
            case Form.TIME | Form.DATETIME | Form.TIMESTAMP:
                return logged.meta == self.scale
            case Form.TEXT | Form.BYTES | Form.GEOMETRY if kind.size:
                return logged.meta == kind.size
            case Form.TEXT | Form.BYTES | Form.UUID | Form.ADDRESS:
                found = _octets(logged.meta) if kind.code == 254 else logged.meta
                return found == (kind.size or self.length)
        return True


def of_log(logged: MapColumn, hint: Column | None, charsets: dict[int, str]) -> Column:
    """Returns a column as the log defines it by its metadata.

    Args:
        hint: a column of that name, for what the log does not tell: UUID and INET6 are BINARY
            there, and a virtual column looks like any other.
        charsets: name by the number of a collation.

    Raises:
        CaptureError: a type or charset that is not served.
    """
    name, meta = logged.name, logged.meta
    is_bytes = logged.collation in (0, BINARY_COLLATION)
    length = scale = 0
    match logged.code:
        case 254:
            length = _octets(meta)
            type = "binary" if is_bytes else "char"
            if hint is not None and hint.type in OWN_BYTES and hint.fits(logged):
                type = hint.type
        case 15:
            length, type = meta, "varbinary" if is_bytes else "varchar"
        case 252:
            type = BLOBS[meta] + ("blob" if is_bytes else "text")
        case 246:
            length, scale, type = meta >> 8, meta & 0xFF, "decimal"
        case code if code in BY_CODE:
            type = BY_CODE[code]
            scale = meta if code in (17, 18, 19) else 0
        case code:
            raise CaptureError(f"column {name} has type {code} in the log, which is not served")
    charset = ""
    if type in ("enum", "set") or TYPES[type].form is Form.TEXT:
        charset = charsets.get(logged.collation, "")
        if charset not in CODECS and charset != "binary":
            raise CaptureError(f"column {name}: collation {logged.collation} is not served")
    made = Column(
        name=name, type=type, unsigned=logged.unsigned, length=length, scale=scale,
        charset=charset, members=tuple(decoded(each, charset) for each in logged.members),
    )  # fmt: skip
    return made if hint is None else replace(made, is_virtual=hint.is_virtual)


def of_catalogue(
    name: str,
    type: str,
    whole: str,
    *,
    octets: int = 0,
    digits: int = 0,
    scale: int = 0,
    charset: str = "",
    extra: str = "",
) -> Column:
    """Returns a column as `information_schema.COLUMNS` has it.

    Args:
        whole: COLUMN_TYPE, such as `enum('a','b')`.
        scale: digits behind the point, of numbers or of seconds.

    Raises:
        CaptureError: a type or charset that is not served.
    """
    if type not in TYPES or " COMPRESSED*/" in whole or "mariadb-5.3" in whole:
        raise CaptureError(f"column {name}: type {whole} is not served")
    form = TYPES[type].form
    if (form is Form.TEXT or charset) and charset not in CODECS and charset != "binary":
        raise CaptureError(f"column {name}: charset {charset} is not served")
    members: tuple[str, ...] = ()
    if form in (Form.ENUM, Form.SET):
        members = tuple(each.replace("''", "'") for each in MEMBER.findall(whole))
    return Column(
        name=name,
        type=type,
        unsigned=" unsigned" in whole,
        length=digits if form in (Form.DECIMAL, Form.INTEGER) else octets,
        scale=scale if form not in (Form.FLOAT, Form.DOUBLE, Form.INTEGER) else 0,
        charset=charset if form in (Form.TEXT, Form.ENUM, Form.SET) else "",
        members=members,
        is_virtual="VIRTUAL GENERATED" in extra.upper(),
    )


def quoted(name: str) -> str:
    """Returns an identifier for a statement."""
    return "`" + name.replace("`", "``") + "`"


def decoded(data: bytes, charset: str) -> str:
    """Returns text; bytes that are none in its charset become U+FFFD."""
    if charset == "latin1":
        return codecs.charmap_decode(data, "strict", LATIN1)[0]
    return data.decode(CODECS.get(charset, "utf-8"), "replace")


def shortest(value: float) -> float:
    """Returns the number with the fewest digits that is this one in 32 bits."""
    wanted = struct.pack("<f", value)
    for digits in range(1, 9):
        found = float(f"{value:.{digits}g}")
        # Rounded up, the largest ones do not fit into 32 bits.
        if abs(found) <= FLOAT_MAX and struct.pack("<f", found) == wanted:
            return found
    return float(f"{value:.9g}")


FLOAT_MAX = 3.4028234663852886e38


def address(raw: bytes) -> str:
    """Returns the text of an INET4 or INET6 as MariaDB prints it: `::` stands for the longest run
    of zeros, be it a single one."""
    if len(raw) == 4:
        return ".".join(map(str, raw))
    groups = [f"{raw[place] << 8 | raw[place + 1]:x}" for place in range(0, 16, 2)]
    if not any(raw[:10]) and (groups[5] == "ffff" or (groups[5] == "0" and groups[6] != "0")):
        return ("::ffff:" if groups[5] == "ffff" else "::") + address(raw[12:])
    runs = re.finditer("0+", "".join("0" if each == "0" else "1" for each in groups))
    spans = [run.span() for run in runs]
    if not spans:
        return ":".join(groups)
    first, last = max(spans, key=lambda span: span[1] - span[0])
    return f"{':'.join(groups[:first])}::{':'.join(groups[last:])}"


def _plain(text: str) -> str:
    """Returns a decimal without the zeros that ZEROFILL puts in front."""
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    whole, point, rest = digits.partition(".")
    return f"{sign}{whole.lstrip('0') or '0'}{point}{rest}"


def _octets(meta: int) -> int:
    """Returns the length of a string of fixed length: two of its bits are in the type's byte."""
    return (meta & 0xFF) | ((meta >> 8 & 0x30 ^ 0x30) << 4)


def _bytes(row: Cursor, code: int, meta: int) -> bytes:
    if code in (252, 255):
        return row.take(row.uint(meta))
    most = _octets(meta) if code == 254 else meta
    return row.take(row.uint(2 if most > 255 else 1))


EPOCH_DAY = date(1970, 1, 1).toordinal()
DIGITS = 9
DIGIT_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
"""Bytes of so many decimal digits."""


def _decimal(row: Cursor, precision: int, scale: int) -> str:
    """Returns a DECIMAL: groups of nine digits, big-endian, all bits turned if it is negative."""
    whole = precision - scale
    parts = [whole % DIGITS, *[DIGITS] * (whole // DIGITS)]
    behind = [*[DIGITS] * (scale // DIGITS), scale % DIGITS]
    size = sum(DIGIT_BYTES[digits] for digits in (*parts, *behind))
    data = bytearray(row.take(size))
    is_negative = not data[0] & 0x80
    data[0] ^= 0x80
    if is_negative:
        data = bytearray(byte ^ 0xFF for byte in data)
    source = Cursor(bytes(data))

    def digits(counts: list[int]) -> str:
        return "".join(
            f"{int.from_bytes(source.take(DIGIT_BYTES[count]), 'big'):0{count}d}"
            for count in counts
            if count
        )

    text = digits(parts).lstrip("0") or "0"
    rest = digits(behind)
    return f"{'-' if is_negative else ''}{text}{'.' if rest else ''}{rest}"


def _fraction(row: Cursor, scale: int) -> tuple[int, int]:
    """Returns (the fraction of a second as it is stored, bytes of it)."""
    size = (scale + 1) // 2
    return int.from_bytes(row.take(size), "big"), size


def _second(second: int, micros: int, scale: int) -> str:
    return f"{second:02d}" + (f".{micros:06d}"[: scale + 1] if scale else "")


MICROS = {0: 0, 1: 10_000, 2: 100, 3: 1}
"""Microseconds of a unit of a fraction, by its bytes."""


def _date(value: int) -> str:
    return f"{value >> 9:04d}-{value >> 5 & 15:02d}-{value & 31:02d}"


def _time(row: Cursor, scale: int) -> str:
    size = (scale + 1) // 2
    # A negative time is the two's complement of whole and fraction together.
    value = int.from_bytes(row.take(3 + size), "big") - (0x800000 << 8 * size)
    sign, value = ("-", -value) if value < 0 else ("", value)
    whole, fraction = value >> 8 * size, value & (1 << 8 * size) - 1
    second = _second(whole & 63, fraction * MICROS[size], scale)
    return f"{sign}{whole >> 12 & 1023:02d}:{whole >> 6 & 63:02d}:{second}"


def _datetime(row: Cursor, scale: int) -> str:
    value = int.from_bytes(row.take(5), "big") - 0x8000000000
    fraction, size = _fraction(row, scale)
    month, day = value >> 22, value >> 17 & 31
    second = _second(value & 63, fraction * MICROS[size], scale)
    clock = f"{value >> 12 & 31:02d}:{value >> 6 & 63:02d}:{second}"
    return f"{month // 13:04d}-{month % 13:02d}-{day:02d}T{clock}"


def _timestamp(row: Cursor, scale: int) -> str:
    seconds = int.from_bytes(row.take(4), "big")
    fraction, size = _fraction(row, scale)
    if not seconds and not fraction:
        # The first moment of 1970 is MariaDB's mark of no moment.
        return f"0000-00-00T00:00:{_second(0, 0, scale)}Z"
    days, clock = divmod(seconds, 86_400)
    second = _second(clock % 60, fraction * MICROS[size], scale)
    day = date.fromordinal(EPOCH_DAY + days).isoformat()
    return f"{day}T{clock // 3600:02d}:{clock // 60 % 60:02d}:{second}Z"
