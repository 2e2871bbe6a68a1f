// Drives a broker with rhea; see ../test_clients.py for the behaviours and the output.
//
//   node rhea.js probe URI STEM
//   node rhea.js failover "uri,uri,uri" QUEUE COUNT
'use strict'

const assert = require('node:assert').strict
const rhea = require('rhea')

const PATIENCE_MS = 30000
const WINDOW = 50

const address = (stem, queue) => `/queues/${stem}.${queue}`
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

function options (uri) {
  const { hostname, port, username, password } = new URL(uri)
  return { host: hostname, port: Number(port), username, password, reconnect: false }
}

/** Resolve with the context of the first event of those names; reject on the other ones. */
function first (emitter, names, faults = []) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`no ${names}`)), PATIENCE_MS)
    const done = (then) => (context) => { clearTimeout(timer); then(context) }
    for (const name of names) emitter.once(name, done(resolve))
    const fail = (context) => {
      const error = (context && (context.receiver || context.sender || context.connection || {}).error) || context
      reject(error instanceof Error ? error : new Error(`${error && error.condition}: ${error && error.description}`))
    }
    for (const name of faults) emitter.once(name, done(fail))
  })
}

class Probes {
  constructor (connection, stem) {
    this.connection = connection
    this.stem = stem
  }

  async sender (target, more = {}) {
    const sender = this.connection.open_sender({ target, ...more })
    if (!sender.sendable()) await first(sender, ['sendable'], ['sender_error', 'sender_close'])
    return sender
  }

  /** Send one message and return the name of its outcome, and its state. */
  async outcome (sender, message) {
    if (!sender.sendable()) await first(sender, ['sendable'])
    const names = ['accepted', 'released', 'rejected', 'modified']
    const told = Promise.race(names.map((name) =>
      new Promise((resolve) => sender.once(name, ({ delivery }) => resolve([name, delivery.remote_state])))))
    sender.send(message)
    const outcome = await told
    for (const name of names) sender.removeAllListeners(name)
    return outcome
  }

  async send (queue, ...messages) {
    const sender = await this.sender(address(this.stem, queue))
    for (const message of messages) {
      const [outcome, state] = await this.outcome(sender, message)
      assert.equal(outcome, 'accepted', JSON.stringify(state))
    }
    sender.close()
  }

  /** A receiver whose messages are settled by hand: `next()` waits for one. */
  async receiver (source, credit, more = {}) {
    const receiver = this.connection.open_receiver({
      source: typeof source === 'string' ? address(this.stem, source) : source,
      credit_window: 0,
      autoaccept: false,
      ...more
    })
    const waiting = []
    receiver.on('message', (context) => { waiting.push(context); receiver.emit('arrived') })
    receiver.next = async () => {
      if (waiting.length === 0) await first(receiver, ['arrived'], ['receiver_error'])
      return waiting.shift()
    }
    receiver.take = async (body) => {
      const context = await receiver.next()
      assert.deepEqual(context.message.body, body)
      context.delivery.accept()
      return context.message
    }
    receiver.waiting = waiting
    // A refused link opens without a source, and the reason follows.
    const refused = first(receiver, ['message'], ['receiver_error'])
    refused.catch(() => {})
    await first(receiver, ['receiver_open'], ['receiver_error'])
    if (!receiver.source.address) await refused
    if (credit) receiver.add_credit(credit)
    return receiver
  }

  async accepted () {
    await this.send('accepted', { body: 'a' }, { body: 'b' })
    const receiver = await this.receiver('accepted', 10)
    await receiver.take('a')
    await receiver.take('b')
  }

  async released () {
    const sender = await this.sender('/exchanges/amq.direct/nothing')
    const [outcome] = await this.outcome(sender, { body: 'x' })
    assert.equal(outcome, 'released')
  }

  async rejected () {
    const sender = await this.sender(address(this.stem, 'full'))
    for (;;) {
      const [outcome, state] = await this.outcome(sender, { body: 'x' })
      if (outcome === 'accepted') continue
      assert.equal(outcome, 'rejected')
      assert.equal(state.error.condition, 'amqp:resource-limit-exceeded')
      assert.equal(state.error.info.reason, 'maxlen')
      return
    }
  }

  async settled () {
    const sender = await this.sender(address(this.stem, 'settled'), { snd_settle_mode: 1 })
    for (const body of ['a', 'b']) sender.send({ body })
    const receiver = await this.receiver('settled', 2, { snd_settle_mode: 1 })
    for (const body of ['a', 'b']) {
      const { message, delivery } = await receiver.next()
      assert.equal(message.body, body)
      assert.ok(delivery.remote_settled)
    }
  }

  async release () {
    await this.send('release', { body: 'again' })
    const receiver = await this.receiver('release', 2)
    ;(await receiver.next()).delivery.release()
    const again = await receiver.take('again')
    assert.equal(again.delivery_count || 0, 0)
    assert.ok(!again.first_acquirer)
  }

  async reject () {
    await this.send('reject', { body: 'bad' })
    const receiver = await this.receiver('reject', 1)
    ;(await receiver.next()).delivery.reject({ condition: 'my:condition', description: 'why' })
    const letter = await (await this.receiver('dead', 1)).take('bad')
    assert.equal(letter.message_annotations['x-first-death-reason'], 'rejected')
  }

  async modify () {
    await this.send('modify', { body: 'again' })
    const receiver = await this.receiver('modify', 2)
    ;(await receiver.next()).delivery.modified({
      delivery_failed: true, message_annotations: { 'x-opt-mine': 'kept' }
    })
    const again = await receiver.take('again')
    assert.equal(again.delivery_count, 1)
    assert.equal(again.message_annotations['x-opt-mine'], 'kept')
  }

  async credit () {
    await this.send('credit', { body: 'a' }, { body: 'b' }, { body: 'c' })
    const receiver = await this.receiver('credit', 2)
    await receiver.take('a')
    await receiver.take('b')
    await this.send('accepted', { body: 'later' })
    assert.equal(receiver.waiting.length, 0)
    receiver.add_credit(1)
    await receiver.take('c')
  }

  async drain () {
    await this.send('drain', { body: 'a' }, { body: 'b' })
    const receiver = await this.receiver('drain', 0)
    const drained = first(receiver, ['receiver_drained'])
    receiver.drain = true
    receiver.add_credit(50)
    await receiver.take('a')
    await receiver.take('b')
    await drained
    assert.equal(receiver.credit, 0)
    receiver.drain = false
    receiver.add_credit(1)
    await this.send('drain', { body: 'c' })
    await receiver.take('c')
  }

  async large () {
    const content = Buffer.alloc(1 << 20, '0123456789abcdef')
    await this.send('large', { body: rhea.message.data_section(content) })
    const { message } = await (await this.receiver('large', 1)).next()
    assert.ok(content.equals(message.body.content))
  }

  async types () {
    const t = rhea.types
    const typed = {
      true: t.wrap_boolean(true),
      ubyte: t.wrap_ubyte(200),
      ushort: t.wrap_ushort(60000),
      uint: t.wrap_uint(4000000000),
      ulong: t.wrap_ulong(9007199254740991),
      byte: t.wrap_byte(-100),
      short: t.wrap_short(-30000),
      int: t.wrap_int(-5),
      long: t.wrap_long(-9007199254740991),
      float: t.wrap_float(1.5),
      double: t.wrap_double(2.25),
      time: t.wrap_timestamp(1700000000123),
      text: 'ü',
      symbol: t.wrap_symbol('s')
    }
    const sent = {
      body: 'x',
      durable: true,
      priority: 3,
      ttl: 3600000,
      message_id: 'my id',
      user_id: Buffer.from('guest'),
      to: '/queues/t',
      subject: 's',
      reply_to: '/queues/r',
      correlation_id: 7,
      content_type: 'text/plain',
      content_encoding: 'none',
      absolute_expiry_time: new Date(1700000000123),
      creation_time: new Date(1700000000123),
      group_id: 'g',
      group_sequence: 5,
      reply_to_group_id: 'rg',
      application_properties: { ...typed, null: null },
      message_annotations: { 'x-opt-list': ['a', 2] }
    }
    await this.send('types', sent)
    const found = await (await this.receiver('types', 1)).take('x')
    for (const name of Object.keys(sent)) {
      if (typeof sent[name] !== 'object' || sent[name] instanceof Date) assert.equal(String(found[name]), String(sent[name]), name)
    }
    assert.equal(found.user_id.toString(), 'guest')
    for (const [name, value] of Object.entries(typed)) {
      assert.equal(Number(found.application_properties[name]) || String(found.application_properties[name]),
        Number(value.value ?? value) || String(value.value ?? value), name)
    }
    assert.equal(found.application_properties.null, null)
    assert.deepEqual(found.message_annotations['x-opt-list'], ['a', 2])
  }

  async bodies () {
    const sections = [
      rhea.message.data_sections([Buffer.from('a'), Buffer.from('b')]),
      { k: 1 },
      rhea.message.sequence_sections([['a', true], [5]])
    ]
    await this.send('bodies', ...sections.map((body) => ({ body })))
    const receiver = await this.receiver('bodies', 3)
    const data = (await receiver.next()).message.body
    assert.deepEqual(data.content.map(String), ['a', 'b'])
    assert.deepEqual((await receiver.next()).message.body, { k: 1 })
    assert.deepEqual((await receiver.next()).message.body.content, [['a', true], [5]])
  }

  async anonymous () {
    const sender = await this.sender({})
    const to = address(this.stem, 'anonymous')
    const [outcome] = await this.outcome(sender, { to, body: 'x' })
    assert.equal(outcome, 'accepted')
    await (await this.receiver('anonymous', 1)).take('x')
  }

  async temporary () {
    const source = { dynamic: true, capabilities: [rhea.types.wrap_symbol('temporary-queue')] }
    const receiver = await this.receiver(source, 1)
    const sender = await this.sender(receiver.source.address)
    await this.outcome(sender, { body: 'x' })
    await receiver.take('x')
  }

  async direct_reply () {
    const source = {
      dynamic: true,
      expiry_policy: 'link-detach',
      capabilities: [rhea.types.wrap_symbol('rabbitmq:volatile-queue')]
    }
    const receiver = await this.receiver(source, 5, { snd_settle_mode: 1 })
    const reply = receiver.source.address
    await this.send('direct_reply', { body: 'ask', reply_to: reply, correlation_id: 'one' })
    const asked = await (await this.receiver('direct_reply', 1)).take('ask')
    const sender = await this.sender(asked.reply_to)
    await this.outcome(sender, { body: 'answer', correlation_id: asked.correlation_id })
    const { message } = await receiver.next()
    assert.deepEqual([message.body, message.correlation_id], ['answer', 'one'])
  }

  async stream () {
    await this.send('stream', { body: 'a' }, { body: 'b' }, { body: 'c' })
    const offset = rhea.types.wrap_described(rhea.types.wrap_long(1), 'rabbitmq:stream-offset-spec')
    const filter = { 'rabbitmq:stream-offset-spec': offset }
    const receiver = await this.receiver({ address: address(this.stem, 'stream'), filter }, 3)
    await receiver.take('b')
    const last = await receiver.take('c')
    assert.equal(last.message_annotations['x-stream-offset'], 2)
  }

  async refused () {
    await assert.rejects(this.receiver({ address: '/queues/none' }), /no queue 'none'/)
    await this.send('refused', { body: 'the session lives' })
  }
}

async function connected (uri, more = {}) {
  const connection = rhea.create_container().connect({ ...options(uri), ...more })
  connection.on('disconnected', () => {})
  connection.on('error', () => {})
  await first(connection, ['connection_open'], ['disconnected', 'connection_error'])
  return connection
}

async function probe (uri, stem) {
  const connection = await connected(uri, { max_frame_size: 4096 })
  const probes = new Probes(connection, stem)
  const names = Object.getOwnPropertyNames(Probes.prototype)
  const helpers = ['constructor', 'sender', 'outcome', 'send', 'receiver']
  for (const name of names.filter((each) => !helpers.includes(each))) {
    let fault = ''
    try {
      await probes[name]()
    } catch (error) {
      fault = String(error.stack || error).slice(0, 500)
    }
    console.log(JSON.stringify({ name, fault }))
  }
  connection.close()
}

// failover.py has the scenario and the output.
const ledger = { confirmed: [], resent: [], delivered: [] }

/** Run work(connection, lost) on one node after the other until it succeeds. */
async function keepDoing (uris, work) {
  for (let at = 0; ; at++) {
    let connection
    try {
      connection = await connected(uris[at % uris.length])
      const lost = new Promise((resolve, reject) => {
        for (const name of ['disconnected', 'connection_close', 'session_close', 'sender_close', 'receiver_close']) {
          connection.once(name, () => reject(new Error(name)))
        }
      })
      lost.catch(() => {})
      await work(connection, lost)
      connection.close()
      return
    } catch (error) {
      if (connection) connection.close()
      await pause(50)
    }
  }
}

async function publish (uris, queue, count) {
  const tried = new Set()
  await keepDoing(uris, async (connection, lost) => {
    const sender = connection.open_sender(`/queues/${queue}`)
    while (ledger.confirmed.length < count) {
      const start = ledger.confirmed.length
      const end = Math.min(start + WINDOW, count)
      if (sender.credit < WINDOW) await Promise.race([first(sender, ['sendable']), lost])
      const told = new Promise((resolve, reject) => {
        let left = end - start
        sender.removeAllListeners('accepted')
        sender.on('accepted', () => { if (--left === 0) resolve() })
        for (const name of ['released', 'rejected', 'modified']) sender.once(name, () => reject(new Error(name)))
      })
      for (let number = start; number < end; number++) {
        if (tried.has(number)) ledger.resent.push(number)
        tried.add(number)
        sender.send({ body: String(number), durable: true })
      }
      await Promise.race([told, lost])
      for (let number = start; number < end; number++) ledger.confirmed.push(number)
      const third = Math.floor(count / 3)
      if (start <= third && third < end) console.log('third')
    }
  })
}

async function consume (uris, queue, count) {
  const seen = new Set()
  await keepDoing(uris, async (connection, lost) => {
    const receiver = connection.open_receiver({ source: `/queues/${queue}`, credit_window: 100, autoaccept: false })
    const finished = new Promise((resolve) => {
      receiver.on('message', ({ message, delivery }) => {
        const number = Number(message.body)
        ledger.delivered.push([number, !message.first_acquirer])
        delivery.accept()
        seen.add(number)
        if (seen.size === count) resolve()
      })
    })
    await Promise.race([finished, lost])
  })
}

async function main ([mode, uri, name, count]) {
  if (mode === 'probe') {
    await probe(uri, name)
    return
  }
  const uris = uri.split(',')
  await Promise.all([
    publish(uris, name, Number(count)), consume([...uris].reverse(), name, Number(count))
  ])
  console.log(JSON.stringify(ledger))
}

main(process.argv.slice(2)).then(() => process.exit(0), (error) => {
  console.error(error)
  process.exit(1)
})
