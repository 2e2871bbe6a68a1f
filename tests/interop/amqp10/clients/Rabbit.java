// Drives a broker with RabbitMQ's Java client of AMQP 1.0; see ../test_clients.py for the behaviours
// and the output.
//
//   java -cp 'jars/*' Rabbit.java probe URI STEM
//   java -cp 'jars/*' Rabbit.java failover "uri,uri,uri" QUEUE COUNT

import com.rabbitmq.client.amqp.*;
import com.rabbitmq.client.amqp.impl.AmqpEnvironmentBuilder;
import java.math.BigDecimal;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;

public class Rabbit {
    static final Duration PATIENCE = Duration.ofSeconds(30);
    static final int WINDOW = 50;

    final Connection connection;
    final Management management;
    final String stem;

    Rabbit(Connection connection, String stem) {
        this.connection = connection;
        this.management = connection.management();
        this.stem = stem;
    }

    interface Step {
        void run() throws Exception;
    }

    static void expect(Object found, Object due) {
        if (!Objects.deepEquals(found, due)) {
            throw new AssertionError(found + " where " + due + " is due");
        }
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static <T> T next(BlockingQueue<T> queue) throws InterruptedException {
        T found = queue.poll(PATIENCE.toSeconds(), TimeUnit.SECONDS);
        if (found == null) throw new AssertionError("nothing came");
        return found;
    }

    String queue(String name) {
        return stem + "." + name;
    }

    static Publisher.Context publish(Publisher publisher, Message message) throws Exception {
        BlockingQueue<Publisher.Context> outcomes = new LinkedBlockingQueue<>();
        publisher.publish(message, outcomes::add);
        return next(outcomes);
    }

    void send(String name, String... bodies) throws Exception {
        try (Publisher publisher = connection.publisherBuilder().queue(queue(name)).build()) {
            for (String body : bodies) {
                expect(publish(publisher, publisher.message(bytes(body))).status(),
                        Publisher.Status.ACCEPTED);
            }
        }
    }

    record Delivery(Consumer.Context context, Message message) {
        String body() {
            return new String(message.body(), StandardCharsets.UTF_8);
        }
    }

    /** A consumer whose messages are settled by hand. */
    final class Inbox implements AutoCloseable {
        final BlockingQueue<Delivery> found = new LinkedBlockingQueue<>();
        final Consumer consumer;

        Inbox(ConsumerBuilder builder) {
            consumer = builder.messageHandler((context, message) ->
                    found.add(new Delivery(context, message))).build();
        }

        Inbox(String name, int credits) {
            this(connection.consumerBuilder().queue(queue(name)).initialCredits(credits));
        }

        Message take(String body) throws Exception {
            Delivery delivery = next(found);
            expect(delivery.body(), body);
            delivery.context().accept();
            return delivery.message();
        }

        public void close() {
            consumer.close();
        }
    }

    void accepted() throws Exception {
        send("accepted", "a", "b");
        try (Inbox inbox = new Inbox("accepted", 10)) {
            inbox.take("a");
            inbox.take("b");
        }
    }

    void released() throws Exception {
        Publisher publisher = connection.publisherBuilder().exchange("amq.direct").key("none").build();
        expect(publish(publisher, publisher.message(bytes("x"))).status(), Publisher.Status.RELEASED);
    }

    void rejected() throws Exception {
        Publisher publisher = connection.publisherBuilder().queue(queue("full")).build();
        while (true) {
            Publisher.Context context = publish(publisher, publisher.message(bytes("x")));
            if (context.status() == Publisher.Status.ACCEPTED) continue;
            expect(context.status(), Publisher.Status.REJECTED);
            String cause = String.valueOf(context.failureCause());
            expect(cause.contains("exceeded maximum length"), true);
            return;
        }
    }

    void settled() throws Exception {
        send("settled", "a");
        ConsumerBuilder builder = connection.consumerBuilder().queue(queue("settled")).preSettled();
        try (Inbox inbox = new Inbox(builder)) {
            expect(next(inbox.found).body(), "a");
        }
    }

    void release() throws Exception {
        send("release", "again");
        try (Inbox inbox = new Inbox("release", 2)) {
            next(inbox.found).context().requeue();
            Message again = inbox.take("again");
            expect(again.deliveryCount(), 0L);
            expect(again.firstAcquirer(), false);
        }
    }

    void reject() throws Exception {
        send("reject", "bad", "worse");
        try (Inbox inbox = new Inbox("reject", 1); Inbox dead = new Inbox("dead", 2)) {
            next(inbox.found).context().discard();
            expect(dead.take("bad").annotation("x-first-death-reason"), "rejected");
            next(inbox.found).context().discard(Map.of("x-opt-mine", "kept"));
            expect(dead.take("worse").annotation("x-opt-mine"), "kept");
        }
    }

    void modify() throws Exception {
        send("modify", "again");
        try (Inbox inbox = new Inbox("modify", 2)) {
            next(inbox.found).context().requeue(Map.of("x-opt-mine", "kept"), true);
            Message again = inbox.take("again");
            expect(again.deliveryCount(), 1L);
            expect(again.annotation("x-opt-mine"), "kept");
        }
    }

    void delay() throws Exception {
        send("delay", "later");
        try (Inbox inbox = new Inbox("delay", 2)) {
            long start = System.nanoTime();
            next(inbox.found).context().delayedRetry(Duration.ofMillis(600));
            inbox.take("later");
            expect(System.nanoTime() - start >= 500_000_000L, true);
        }
    }

    void credit() throws Exception {
        send("credit", "a", "b", "c");
        try (Inbox inbox = new Inbox("credit", 2)) {
            Delivery a = next(inbox.found);
            Delivery b = next(inbox.found);
            expect(inbox.found.poll(200, TimeUnit.MILLISECONDS), null);
            expect(inbox.consumer.unsettledMessageCount(), 2L);
            a.context().accept();
            b.context().accept();
            inbox.take("c");
        }
    }

    void pause() throws Exception {
        try (Inbox inbox = new Inbox("pause", 10)) {
            inbox.consumer.pause();
            send("pause", "a");
            expect(inbox.found.poll(200, TimeUnit.MILLISECONDS), null);
            inbox.consumer.unpause();
            inbox.take("a");
        }
    }

    void batch() throws Exception {
        send("batch", "a", "b", "c");
        try (Inbox inbox = new Inbox("batch", 5)) {
            Delivery first = next(inbox.found);
            Consumer.BatchContext batch = first.context().batch(3);
            batch.add(first.context());
            batch.add(next(inbox.found).context());
            batch.add(next(inbox.found).context());
            batch.accept();
        }
        until(() -> management.queueInfo(queue("batch")).messageCount() == 0);
    }

    static void until(Callable<Boolean> condition) throws Exception {
        long end = System.nanoTime() + PATIENCE.toNanos();
        while (!condition.call()) {
            if (System.nanoTime() > end) throw new AssertionError("it did not come true");
            Thread.sleep(20);
        }
    }

    void large() throws Exception {
        byte[] body = new byte[1 << 20];
        new Random(1).nextBytes(body);
        Publisher publisher = connection.publisherBuilder().queue(queue("large")).build();
        expect(publish(publisher, publisher.message(body)).status(), Publisher.Status.ACCEPTED);
        try (Inbox inbox = new Inbox("large", 1)) {
            Delivery found = next(inbox.found);
            expect(found.message().body(), body);
            found.context().accept();
        }
    }

    void types() throws Exception {
        UUID uuid = UUID.randomUUID();
        Publisher publisher = connection.publisherBuilder().queue(queue("types")).build();
        Message sent = publisher.message(bytes("x")).messageId(uuid).correlationId(7L)
                .userId(bytes("guest")).to("/queues/t").subject("s").replyTo("/queues/r")
                .contentType("text/plain").contentEncoding("none").absoluteExpiryTime(1_700_000_000_123L)
                .creationTime(1_700_000_000_456L).groupId("g").groupSequence(5).replyToGroupId("rg")
                .durable(true).priority((byte) 3).ttl(Duration.ofHours(1))
                .property("boolean", true).property("byte", (byte) -100).property("short", (short) -30000)
                .property("int", -5).property("long", -1L << 62).propertyUnsigned("ubyte", (byte) 200)
                .propertyUnsigned("ushort", (short) 60000).propertyUnsigned("uint", -1)
                .propertyUnsigned("ulong", -1L).property("float", 1.5f).property("double", 2.25)
                .propertyDecimal32("d32", new BigDecimal("1.5")).propertyDecimal64("d64", new BigDecimal("2.5"))
                .propertyDecimal128("d128", new BigDecimal("3.5")).property("char", 'ü')
                .property("uuid", uuid)
                .property("text", "ü").propertySymbol("symbol", "s")
                .annotation("x-opt-mine", List.of("a", 2L));
        expect(publish(publisher, sent).status(), Publisher.Status.ACCEPTED);
        try (Inbox inbox = new Inbox("types", 1)) {
            Message found = inbox.take("x");
            expect(found.messageIdAsUuid(), uuid);
            expect(found.correlationIdAsLong(), 7L);
            expect(found.userId(), bytes("guest"));
            expect(List.of(found.to(), found.subject(), found.replyTo(), found.contentType()),
                    List.of("/queues/t", "s", "/queues/r", "text/plain"));
            expect(List.of(found.contentEncoding(), found.groupId(), found.replyToGroupId()),
                    List.of("none", "g", "rg"));
            expect(found.absoluteExpiryTime(), 1_700_000_000_123L);
            expect(found.creationTime(), 1_700_000_000_456L);
            expect(found.groupSequence(), 5);
            expect(found.durable(), true);
            expect(found.priority(), (byte) 3);
            expect(found.ttl(), Duration.ofHours(1));
            expect(found.annotation("x-opt-mine"), List.of("a", 2L));
            sent.forEachProperty((name, value) -> expect(found.property(name), value));
        }
    }

    void anonymous() throws Exception {
        Publisher publisher = connection.publisherBuilder().build();
        Message message = publisher.message(bytes("x")).toAddress().queue(queue("anonymous")).message();
        expect(publish(publisher, message).status(), Publisher.Status.ACCEPTED);
        try (Inbox inbox = new Inbox("anonymous", 1)) {
            inbox.take("x");
        }
    }

    void stream() throws Exception {
        send("stream", "a", "b", "c");
        ConsumerBuilder builder = connection.consumerBuilder().queue(queue("stream")).initialCredits(3)
                .stream().offset(1).builder();
        try (Inbox inbox = new Inbox(builder)) {
            inbox.take("b");
            expect(inbox.take("c").annotation("x-stream-offset"), 2L);
        }
    }

    void refused() throws Exception {
        try {
            connection.consumerBuilder().queue("none").messageHandler((context, message) -> { }).build();
            throw new AssertionError("not refused");
        } catch (AmqpException.AmqpEntityDoesNotExistException error) {
            expect(error.getMessage().contains("no queue 'none'"), true);
        }
        send("refused", "the session lives");
    }

    void direct_reply() throws Exception {
        Responder responder = connection.responderBuilder().requestQueue(queue("direct_reply"))
                .handler((context, request) -> context.message(bytes("answer to "
                        + new String(request.body(), StandardCharsets.UTF_8)))).build();
        Requester requester = connection.requesterBuilder().requestAddress().queue(queue("direct_reply"))
                .requester().build();
        Message answer = requester.publish(requester.message(bytes("ask")))
                .get(PATIENCE.toSeconds(), TimeUnit.SECONDS);
        expect(new String(answer.body(), StandardCharsets.UTF_8), "answer to ask");
        requester.close();
        responder.close();
    }

    void declare() throws Exception {
        String name = queue("declared"), exchange = queue("exchange");
        Management.QueueInfo made = management.queue(name).type(Management.QueueType.QUORUM)
                .deadLetterExchange("").deadLetterRoutingKey("x").quorum().deliveryLimit(3).queue().declare();
        expect(made.type(), Management.QueueType.QUORUM);
        expect(made.members().size(), 3);
        management.exchange(exchange).type(Management.ExchangeType.TOPIC).declare();
        management.binding().sourceExchange(exchange).destinationQueue(name).key("a.*")
                .argument("k", 1L).bind();
        management.binding().sourceExchange(exchange).destinationQueue(name).key("b").bind();
        Publisher publisher = connection.publisherBuilder().exchange(exchange).key("a.b").build();
        expect(publish(publisher, publisher.message(bytes("x"))).status(), Publisher.Status.ACCEPTED);
        until(() -> management.queueInfo(name).messageCount() == 1);
        expect(management.queuePurge(name).messageCount(), 1L);
        management.unbind().sourceExchange(exchange).destinationQueue(name).key("a.*")
                .argument("k", 1L).unbind();
        expect(publish(publisher, publisher.message(bytes("x"))).status(), Publisher.Status.RELEASED);
        try {
            management.queue(name).type(Management.QueueType.CLASSIC).declare();
            throw new AssertionError("declared twice");
        } catch (AmqpException error) {
            expect(error.getMessage().contains("409"), true);
        }
        publisher.close();
        management.exchangeDelete(exchange);
        management.queueDelete(name);
    }

    void temporary() throws Exception {
        // An exclusive queue without a name.
        String name = management.queue().exclusive(true).autoDelete(true)
                .type(Management.QueueType.CLASSIC).declare().name();
        Publisher publisher = connection.publisherBuilder().queue(name).build();
        expect(publish(publisher, publisher.message(bytes("x"))).status(), Publisher.Status.ACCEPTED);
        publisher.close();
        management.queueDelete(name);
    }

    static Connection connect(Environment environment, String... uris) {
        List<Address> addresses = new ArrayList<>();
        for (String each : uris) {
            URI uri = URI.create(each);
            addresses.add(new Address(uri.getHost(), uri.getPort()));
        }
        // The nodes in this order, from one attempt to the next.
        AtomicInteger tries = new AtomicInteger();
        return environment.connectionBuilder().username("guest").password("guest")
                .addressSelector(all -> addresses.get(tries.getAndIncrement() % addresses.size()))
                .recovery().backOffDelayPolicy(BackOffDelayPolicy.fixed(Duration.ofMillis(100)))
                .connectionBuilder().build();
    }

    void probes() {
        Map<String, Step> steps = new LinkedHashMap<>();
        steps.put("accepted", this::accepted);
        steps.put("released", this::released);
        steps.put("rejected", this::rejected);
        steps.put("settled", this::settled);
        steps.put("release", this::release);
        steps.put("reject", this::reject);
        steps.put("modify", this::modify);
        steps.put("delay", this::delay);
        steps.put("credit", this::credit);
        steps.put("pause", this::pause);
        steps.put("batch", this::batch);
        steps.put("large", this::large);
        steps.put("types", this::types);
        steps.put("anonymous", this::anonymous);
        steps.put("stream", this::stream);
        steps.put("refused", this::refused);
        steps.put("direct_reply", this::direct_reply);
        steps.put("declare", this::declare);
        steps.put("temporary", this::temporary);
        steps.forEach((name, step) -> {
            String fault = "";
            try {
                step.run();
            } catch (Throwable error) {
                StackTraceElement[] trace = error.getStackTrace();
                fault = error + " " + Arrays.stream(trace)
                        .filter(each -> each.getClassName().startsWith("Rabbit")).limit(3).toList();
            }
            System.out.println("{\"name\": \"" + name + "\", \"fault\": \""
                    + fault.replaceAll("[\\\\\"\\p{Cntrl}]", "'") + "\"}");
        });
    }

    /** failover.py has the scenario and the output. The client recovers by itself. */
    static void failover(Environment environment, String[] uris, String queue, int count) throws Exception {
        List<Integer> confirmed = new ArrayList<>();
        Set<Integer> resent = new TreeSet<>();
        List<String> delivered = Collections.synchronizedList(new ArrayList<>());
        Set<Integer> seen = ConcurrentHashMap.newKeySet();
        CountDownLatch done = new CountDownLatch(1);
        String[] backwards = {uris[2], uris[1], uris[0]};
        Connection consuming = connect(environment, backwards);
        consuming.consumerBuilder().queue(queue).initialCredits(100).messageHandler((context, message) -> {
            int number = Integer.parseInt(new String(message.body(), StandardCharsets.UTF_8));
            delivered.add("[" + number + ", " + (message.firstAcquirer() ? 0 : 1) + "]");
            context.accept();
            seen.add(number);
            if (seen.size() == count) done.countDown();
        }).build();
        Connection publishing = connect(environment, uris);
        Publisher publisher = publishing.publisherBuilder().queue(queue).build();
        while (confirmed.size() < count) {
            int start = confirmed.size(), end = Math.min(start + WINDOW, count);
            CountDownLatch left = new CountDownLatch(end - start);
            AtomicBoolean failed = new AtomicBoolean();
            for (int number = start; number < end; number++) {
                try {
                    publisher.publish(publisher.message(bytes("" + number)), context -> {
                        if (context.status() != Publisher.Status.ACCEPTED) failed.set(true);
                        left.countDown();
                    });
                } catch (AmqpException error) {
                    failed.set(true);
                    break;
                }
            }
            if (failed.get() || !left.await(5, TimeUnit.SECONDS) || failed.get()) {
                for (int number = start; number < end; number++) resent.add(number);
                Thread.sleep(100);
                continue;
            }
            for (int number = start; number < end; number++) confirmed.add(number);
            int third = count / 3;
            if (start <= third && third < end) System.out.println("third");
        }
        done.await();
        System.out.println("{\"confirmed\": " + confirmed + ", \"resent\": " + resent
                + ", \"delivered\": " + delivered + "}");
    }

    public static void main(String[] words) throws Exception {
        Environment environment = new AmqpEnvironmentBuilder().build();
        if (words[0].equals("probe")) {
            new Rabbit(connect(environment, words[1]), words[2]).probes();
        } else {
            failover(environment, words[1].split(","), words[2], Integer.parseInt(words[3]));
        }
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
