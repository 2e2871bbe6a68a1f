"""RocketMQ's remoting protocol: commands, what their bodies hold, servers and clients of it."""
