// Publishes and consumes numbers with amqplib; see failover.py for the scenario and the output.
//
//   node amqplib.js "uri,uri,uri" QUEUE COUNT
'use strict'

const amqp = require('amqplib')

const [uriList, queue, countText] = process.argv.slice(2)
const uris = uriList.split(',')
const count = Number(countText)
const WINDOW = 50
const PREFETCH = 100

const ledger = { confirmed: [], resent: [], delivered: [] }
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

/** Run work(connection, closed) on one node after the other until it succeeds. */
async function keepDoing (order, work) {
  for (let attempt = 0; ; attempt++) {
    let connection
    try {
      connection = await amqp.connect(order[attempt % order.length], { timeout: 5000 })
      const closed = new Promise((resolve, reject) => {
        connection.on('error', reject)
        connection.on('close', () => reject(new Error('closed')))
      })
      closed.catch(() => {})
      await work(connection, closed)
      await connection.close().catch(() => {})
      return
    } catch (error) {
      if (connection) await connection.close().catch(() => {})
      await pause(50)
    }
  }
}

async function publish () {
  const tried = new Set()
  await keepDoing(uris, async (connection, closed) => {
    const channel = await connection.createConfirmChannel()
    channel.on('error', () => {})
    while (ledger.confirmed.length < count) {
      const start = ledger.confirmed.length
      const end = Math.min(start + WINDOW, count)
      for (let number = start; number < end; number++) {
        if (tried.has(number)) ledger.resent.push(number)
        tried.add(number)
        channel.sendToQueue(queue, Buffer.from(String(number)), { persistent: true })
      }
      await Promise.race([channel.waitForConfirms(), closed])
      for (let number = start; number < end; number++) ledger.confirmed.push(number)
      const third = Math.floor(count / 3)
      if (start <= third && third < end) console.log('third')
    }
  })
}

async function consume () {
  const seen = new Set()
  await keepDoing([...uris].reverse(), async (connection, closed) => {
    const channel = await connection.createChannel()
    channel.on('error', () => {})
    await channel.prefetch(PREFETCH)
    const finished = new Promise((resolve, reject) => {
      channel.consume(queue, (message) => {
        if (message === null) {
          reject(new Error('cancelled'))
          return
        }
        const number = Number(message.content.toString())
        ledger.delivered.push([number, message.fields.redelivered])
        channel.ack(message)
        seen.add(number)
        if (seen.size === count) resolve()
      }).catch(reject)
    })
    await Promise.race([finished, closed])
    await channel.close()
  })
}

Promise.all([publish(), consume()]).then(() => {
  console.log(JSON.stringify(ledger))
  process.exit(0)
}, (error) => {
  console.error(error)
  process.exit(1)
})
