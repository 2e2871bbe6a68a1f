// Sends five messages and consumes them, with RocketMQ's client for Node. It makes no topics:
//
//     mqadmin updateTopic -n 127.0.0.1:9876 -c DefaultCluster -t hello-node
//     npm install ali-ons@3.12.0
//     node hello.js 127.0.0.1:9876
'use strict';
const { Consumer, Message, Producer } = require('ali-ons');

const httpclient = { request: async () => { throw new Error('not used'); } };
const logger = { info() {}, debug() {}, warn() {}, error: console.error };
const common = {
  httpclient, logger, nameSrv: process.argv[2], accessKeyId: '-', accessKeySecret: '-',
};

async function main() {
  const producer = new Producer({ ...common, producerGroup: 'hello-producers' });
  await producer.ready();
  for (let n = 0; n < 5; n++) {
    await producer.send(new Message('hello-node', '*', 'hello ' + n));
  }
  const consumer = new Consumer({
    ...common, consumerGroup: 'hello-node-consumers', consumeFromWhere: 'CONSUME_FROM_FIRST_OFFSET',
  });
  let left = 5;
  consumer.subscribe('hello-node', '*', async message => {
    console.log('received ' + message.body);
    if (--left === 0) process.exit(0);
  });
}

main();
