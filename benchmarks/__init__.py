"""Side-by-side measurements of ConvoyMQ and RabbitMQ on one machine, in one run."""
