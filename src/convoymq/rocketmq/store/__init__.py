"""Messages of a broker group, in RocketMQ's files: commit log, consume queues, index."""
