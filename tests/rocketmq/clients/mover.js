// Sends and consumes until its input has a line, then consumes until it is ended. Prints `sent BODY`
// for what was confirmed and `got QUEUE OFFSET BODY`. A body is `node:0:NUMBER`; its queue is any.
'use strict';
const { Consumer, Producer, Message } = require('ali-ons');
const httpclient = { request: async () => { throw new Error('no requests by HTTP'); } };
const quiet = { info() {}, debug() {}, warn() {}, error(...a) { console.error(...a); } };
const common = { httpclient, logger: quiet, nameSrv: process.argv[2], accessKeyId: 'x', accessKeySecret: 'y', pollNameServerInteval: 1000 };
const pause = ms => new Promise(resolve => setTimeout(resolve, ms));

async function main() {
  const topic = process.argv[3];
  const consumer = new Consumer({ ...common, consumerGroup: 'node-movers', consumeFromWhere: 'CONSUME_FROM_FIRST_OFFSET' });
  consumer.on('error', error => console.error(error));
  consumer.subscribe(topic, '*', async message => {
    console.log(`got ${message.queueId} ${message.queueOffset} ${message.body}`);
  });
  const producer = new Producer({ ...common, producerGroup: 'node-producers' });
  producer.on('error', error => console.error(error));
  await producer.ready();
  let ended = false;
  process.stdin.once('data', () => { ended = true; });
  for (let number = 0; !ended; number++) {
    const body = `node:0:${number}`;
    while (true) {
      try {
        const result = await producer.send(new Message(topic, body));
        if (result.sendStatus === 'SEND_OK') break;
      } catch (error) {
        console.error(String(error));
      }
      await pause(100);
    }
    console.log('sent ' + body);
    await pause(20);
  }
  console.log('done');
}
main();
