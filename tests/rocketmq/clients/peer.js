// The Node client (ali-ons) against a broker: each step prints `ok NAME` or `bad NAME WHY`.
'use strict';
const { Consumer, Producer, Message } = require('ali-ons');
const httpclient = { request: async () => { throw new Error('no requests by HTTP'); } };
const quiet = { info() {}, debug() {}, warn() {}, error(...a) { console.error(...a); } };
const common = { httpclient, logger: quiet, nameSrv: process.argv[2], accessKeyId: 'x', accessKeySecret: 'y' };

async function step(name, run) {
  try {
    await run();
    console.log('ok ' + name);
  } catch (error) {
    console.log('bad ' + name + ' ' + error);
  }
}

function take(group, topic, tags, count) {
  return new Promise((resolve, reject) => {
    const consumer = new Consumer({ ...common, consumerGroup: group, consumeFromWhere: 'CONSUME_FROM_FIRST_OFFSET' });
    const seen = new Set();
    const timer = setTimeout(() => reject(new Error(`only ${seen.size} of ${count}`)), 90000);
    consumer.on('error', error => console.error(error));
    consumer.subscribe(topic, tags, async message => {
      seen.add(message.body.toString());
      if (seen.size === count) {
        clearTimeout(timer);
        resolve([ ...seen ]);
      }
    });
  });
}

async function main() {
  const producer = new Producer({ ...common, producerGroup: 'node-producers' });
  producer.on('error', error => console.error(error));
  await producer.ready();
  await step('send', async () => {
    for (let i = 0; i < 20; i++) {
      const result = await producer.send(new Message('node-plain', i % 2 ? 'odd' : 'even', 'm' + i));
      if (result.sendStatus !== 'SEND_OK') throw new Error(JSON.stringify(result));
    }
  });
  await step('push', () => take('node-all', 'node-plain', '*', 20));
  await step('tags', async () => {
    for (const body of await take('node-odd', 'node-plain', 'odd', 10)) {
      if (Number(body.slice(1)) % 2 === 0) throw new Error(body);
    }
  });
  console.log('end');
  process.exit(0);
}
main().catch(error => {
  console.log('bad main ' + error);
  process.exit(1);
});
