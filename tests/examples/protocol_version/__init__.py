"""Another version of AMQP beside 0-9-1, on its port."""
