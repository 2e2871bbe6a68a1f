"""AMQP 1.0: clients of RabbitMQ 4, Qpid, Azure and JMS on the AMQP port."""
