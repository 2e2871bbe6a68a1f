"""Sends five messages and consumes them, with ConvoyMQ's client of RocketMQ's protocol. It makes no
topics:

    mqadmin updateTopic -n 127.0.0.1:9876 -c DefaultCluster -t hello-python
    python hello.py 127.0.0.1:9876
"""

import asyncio
import sys

from convoymq.rocketmq.client.client import RocketClient, content_of

TOPIC = "hello-python"


async def main(name_servers: str) -> None:
    client = RocketClient(name_servers, group="hello-python-consumers")
    queues = await client.queues(TOPIC)
    for number in range(5):
        body = f"hello {number}".encode()
        await client.send(TOPIC, queues[number % len(queues)], body, {"TAGS": "greeting"})
    for queue in queues:
        offset = await client.committed(TOPIC, queue) or 0
        while True:
            found = await client.pull(TOPIC, queue, offset, count=32, bytes_max=1 << 20, hold_ms=0)
            if not found.messages:
                break
            for message in found.messages:
                print("received", content_of(message).decode())
            offset = found.next
            await client.commit(TOPIC, queue, offset)
    await client.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
