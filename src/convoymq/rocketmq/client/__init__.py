"""Client of RocketMQ's protocol: for bridges, Spark and programs (docs/rocketmq.md)."""
