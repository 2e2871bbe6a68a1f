"""A line protocol beside AMQP, on its port."""
