"""Messages of AMQP 1.0: types, sections, and conversion to and from AMQP 0-9-1."""
