"""Columns of messages: the writer of columnar frames, which reads records in every encoding.

A row has the properties as they are stored and the body as AMQP 0-9-1 has it.
"""

from __future__ import annotations

from convoymq.kernels.column_writer import ColumnWriter as ColumnWriter
from convoymq.messages.record import as_amqp091 as as_amqp091
