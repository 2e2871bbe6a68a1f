"""Dynamic shovels: clients of AMQP 0-9-1 and 1.0 that move messages from one broker to another."""
