// Drives a broker with Qpid JMS; see ../test_clients.py for the behaviours and the output.
//
//   java -cp 'jars/*' Jms.java probe URI STEM
//   java -cp 'jars/*' Jms.java failover "uri,uri,uri" QUEUE COUNT

import jakarta.jms.*;
import jakarta.jms.Queue;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;
import org.apache.qpid.jms.JmsConnectionFactory;

public class Jms {
    static final int PATIENCE_MS = 30_000;
    static final int INDIVIDUAL_ACKNOWLEDGE = 101;
    static final int WINDOW = 50;

    final Connection connection;
    final String stem;

    Jms(Connection connection, String stem) {
        this.connection = connection;
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

    static JMSException refusal(Step step) throws Exception {
        try {
            step.run();
        } catch (JMSException error) {
            return error;
        }
        throw new AssertionError("not refused");
    }

    static Queue queue(Session session, String name) throws JMSException {
        return session.createQueue("/queues/" + name);
    }

    /** Work on one queue, in a session of its own. */
    final class Place implements AutoCloseable {
        final Session session;
        final Queue queue;
        final MessageProducer producer;

        Place(String name, int mode) throws JMSException {
            session = connection.createSession(mode);
            queue = queue(session, stem + "." + name);
            producer = session.createProducer(queue);
        }

        void send(String... texts) throws JMSException {
            for (String text : texts) producer.send(session.createTextMessage(text));
        }

        MessageConsumer consumer() throws JMSException {
            return session.createConsumer(queue);
        }

        public void close() throws JMSException {
            session.close();
        }
    }

    static Message take(MessageConsumer consumer, String text) throws JMSException {
        Message message = consumer.receive(PATIENCE_MS);
        if (message == null) throw new AssertionError("nothing came where " + text + " is due");
        expect(((TextMessage) message).getText(), text);
        return message;
    }

    Place auto(String name) throws JMSException {
        return new Place(name, Session.AUTO_ACKNOWLEDGE);
    }

    void accepted() throws Exception {
        try (Place place = auto("accepted")) {
            place.send("a", "b");
            MessageConsumer consumer = place.consumer();
            take(consumer, "a");
            take(consumer, "b");
        }
    }

    void released() throws Exception {
        try (Place place = auto("accepted")) {
            Destination nowhere = place.session.createQueue("/exchanges/amq.direct/nothing");
            MessageProducer producer = place.session.createProducer(nowhere);
            refusal(() -> producer.send(place.session.createTextMessage("x")));
        }
    }

    void rejected() throws Exception {
        try (Place place = auto("full")) {
            JMSException error = refusal(() -> {
                while (true) place.send("x");
            });
            expect(String.valueOf(error.getMessage()).contains("exceeded maximum length"), true);
        }
    }

    /** CLIENT_ACKNOWLEDGE: what was not acknowledged comes again after `recover`, counted. */
    void recover() throws Exception {
        try (Place place = new Place("recover", Session.CLIENT_ACKNOWLEDGE)) {
            place.send("a", "b");
            MessageConsumer consumer = place.consumer();
            take(consumer, "a").acknowledge();
            expect(take(consumer, "b").getJMSRedelivered(), false);
            place.session.recover();
            Message again = take(consumer, "b");
            expect(again.getJMSRedelivered(), true);
            expect(again.getIntProperty("JMSXDeliveryCount"), 2);
            again.acknowledge();
        }
    }

    void individual() throws Exception {
        try (Place place = new Place("individual", INDIVIDUAL_ACKNOWLEDGE)) {
            place.send("a", "b");
            MessageConsumer consumer = place.consumer();
            take(consumer, "a");
            take(consumer, "b").acknowledge();
        }
        try (Place place = auto("individual")) {
            take(place.consumer(), "a");
            expect(place.consumer().receiveNoWait(), null);
        }
    }

    void settled() throws Exception {
        try (Place place = new Place("settled", Session.DUPS_OK_ACKNOWLEDGE)) {
            place.send("a");
            take(place.consumer(), "a");
        }
    }

    /** What a session has not acknowledged at its end comes again. */
    void release() throws Exception {
        try (Place place = new Place("release", Session.CLIENT_ACKNOWLEDGE)) {
            place.send("a");
            take(place.consumer(), "a");
        }
        try (Place place = auto("release")) {
            take(place.consumer(), "a");
        }
    }

    void listener() throws Exception {
        try (Place place = auto("listener")) {
            BlockingQueue<String> found = new LinkedBlockingQueue<>();
            place.consumer().setMessageListener(message -> {
                try {
                    found.add(((TextMessage) message).getText());
                } catch (JMSException error) {
                    found.add(error.toString());
                }
            });
            try (Place other = auto("listener")) {
                other.send("a", "b");
            }
            expect(found.poll(PATIENCE_MS, TimeUnit.MILLISECONDS), "a");
            expect(found.poll(PATIENCE_MS, TimeUnit.MILLISECONDS), "b");
        }
    }

    /** receiveNoWait of an empty queue drains. */
    void drain() throws Exception {
        try (Place place = auto("drain")) {
            MessageConsumer consumer = place.consumer();
            expect(consumer.receiveNoWait(), null);
            expect(consumer.receive(50), null);
            place.send("a");
            take(consumer, "a");
        }
    }

    void large() throws Exception {
        byte[] body = new byte[1 << 20];
        new Random(1).nextBytes(body);
        try (Place place = auto("large")) {
            BytesMessage message = place.session.createBytesMessage();
            message.writeBytes(body);
            place.producer.send(message);
            byte[] found = place.consumer().receive(PATIENCE_MS).getBody(byte[].class);
            expect(found, body);
        }
    }

    void types() throws Exception {
        Map<String, Object> values = new LinkedHashMap<>();
        values.put("boolean", true);
        values.put("byte", (byte) -100);
        values.put("short", (short) -30000);
        values.put("int", -5);
        values.put("long", -1L << 62);
        values.put("float", 1.5f);
        values.put("double", 2.25);
        values.put("text", "ü");
        try (Place place = auto("types")) {
            Message sent = place.session.createTextMessage("x");
            for (Map.Entry<String, Object> each : values.entrySet()) {
                sent.setObjectProperty(each.getKey(), each.getValue());
            }
            sent.setJMSCorrelationID("one");
            sent.setJMSType("kind");
            sent.setJMSReplyTo(place.queue);
            sent.setStringProperty("JMSXGroupID", "g");
            sent.setIntProperty("JMSXGroupSeq", 5);
            place.producer.send(sent, DeliveryMode.PERSISTENT, 7, 3_600_000);
            Message found = take(place.consumer(), "x");
            for (Map.Entry<String, Object> each : values.entrySet()) {
                expect(found.getObjectProperty(each.getKey()), each.getValue());
            }
            expect(found.getJMSMessageID(), sent.getJMSMessageID());
            expect(found.getJMSCorrelationID(), "one");
            expect(found.getJMSType(), "kind");
            expect(((Queue) found.getJMSReplyTo()).getQueueName(), place.queue.getQueueName());
            expect(found.getStringProperty("JMSXGroupID"), "g");
            expect(found.getIntProperty("JMSXGroupSeq"), 5);
            expect(found.getJMSPriority(), 7);
            expect(found.getJMSDeliveryMode(), DeliveryMode.PERSISTENT);
            expect(found.getJMSExpiration(), sent.getJMSExpiration());
            expect(found.getJMSTimestamp(), sent.getJMSTimestamp());
            expect(found.getJMSDestination(), place.queue);
        }
    }

    /** Map, stream and object messages: values, sequences, data. */
    void bodies() throws Exception {
        try (Place place = auto("bodies")) {
            MapMessage map = place.session.createMapMessage();
            map.setLong("k", 1);
            map.setBytes("b", new byte[] {0, -1});
            StreamMessage stream = place.session.createStreamMessage();
            stream.writeString("a");
            stream.writeBoolean(true);
            place.producer.send(map);
            place.producer.send(stream);
            place.producer.send(place.session.createObjectMessage(new ArrayList<>(List.of("a", 2))));
            MessageConsumer consumer = place.consumer();
            MapMessage foundMap = (MapMessage) consumer.receive(PATIENCE_MS);
            expect(foundMap.getLong("k"), 1L);
            expect(foundMap.getBytes("b"), new byte[] {0, -1});
            StreamMessage foundStream = (StreamMessage) consumer.receive(PATIENCE_MS);
            expect(foundStream.readString(), "a");
            expect(foundStream.readBoolean(), true);
            expect(consumer.receive(PATIENCE_MS).getBody(Object.class), List.of("a", 2));
        }
    }

    void anonymous() throws Exception {
        try (Place place = auto("anonymous")) {
            MessageProducer producer = place.session.createProducer(null);
            producer.send(place.queue, place.session.createTextMessage("x"));
            take(place.consumer(), "x");
        }
    }

    void temporary() throws Exception {
        try (Place place = auto("temporary")) {
            TemporaryQueue reply = place.session.createTemporaryQueue();
            TextMessage request = place.session.createTextMessage("ask");
            request.setJMSReplyTo(reply);
            place.producer.send(request);
            Message asked = take(place.consumer(), "ask");
            MessageProducer answering = place.session.createProducer(asked.getJMSReplyTo());
            answering.send(place.session.createTextMessage("answer"));
            MessageConsumer consumer = place.session.createConsumer(reply);
            take(consumer, "answer");
            consumer.close();
            answering.close();
            reply.delete();
        }
    }

    void refused() throws Exception {
        try (Place place = auto("refused")) {
            JMSException error = refusal(() ->
                    place.session.createConsumer(place.session.createQueue("/queues/none")));
            expect(error instanceof InvalidDestinationException, true);
            expect(error.getMessage().contains("no queue 'none'"), true);
            place.send("the session lives");
        }
    }

    void probes() {
        Map<String, Step> steps = new LinkedHashMap<>();
        steps.put("accepted", this::accepted);
        steps.put("released", this::released);
        steps.put("rejected", this::rejected);
        steps.put("settled", this::settled);
        steps.put("release", this::release);
        steps.put("recover", this::recover);
        steps.put("individual", this::individual);
        steps.put("listener", this::listener);
        steps.put("drain", this::drain);
        steps.put("large", this::large);
        steps.put("types", this::types);
        steps.put("bodies", this::bodies);
        steps.put("anonymous", this::anonymous);
        steps.put("temporary", this::temporary);
        steps.put("refused", this::refused);
        steps.put("selector", this::selector);
        steps.put("browse", this::browse);
        steps.put("durable", this::durable);
        steps.put("transacted", this::transacted);
        steps.forEach((name, step) -> {
            String fault = "";
            try {
                step.run();
            } catch (Throwable error) {
                fault = error + " " + Arrays.stream(error.getStackTrace())
                        .filter(each -> each.getClassName().startsWith("Jms")).limit(3).toList();
            }
            System.out.println("{\"name\": \"" + name + "\", \"fault\": \""
                    + fault.replaceAll("[\\\\\"\\p{Cntrl}]", "'") + "\"}");
        });
    }

    void selector() throws Exception {
        try (Place place = auto("selector")) {
            for (int number = 0; number < 4; number++) {
                Message message = place.session.createTextMessage("" + number);
                message.setIntProperty("n", number);
                place.producer.send(message);
            }
            take(place.session.createConsumer(place.queue, "n > 2"), "3");
        }
    }

    void browse() throws Exception {
        try (Place place = auto("browse")) {
            place.send("a", "b");
            QueueBrowser browser = place.session.createBrowser(place.queue);
            List<String> found = new ArrayList<>();
            for (Enumeration<?> each = browser.getEnumeration(); each.hasMoreElements(); ) {
                found.add(((TextMessage) each.nextElement()).getText());
            }
            expect(found, List.of("a", "b"));
            browser.close();
            take(place.consumer(), "a");
        }
    }

    void durable() throws Exception {
        try (Place place = auto("durable")) {
            Topic topic = place.session.createTopic("/exchanges/amq.topic/" + stem);
            MessageConsumer consumer = place.session.createDurableConsumer(topic, "subscription");
            consumer.close();
            place.session.createProducer(topic).send(place.session.createTextMessage("kept"));
            take(place.session.createDurableConsumer(topic, "subscription"), "kept");
        }
    }

    void transacted() throws Exception {
        try (Place place = new Place("transacted", Session.SESSION_TRANSACTED)) {
            place.send("a");
            place.session.rollback();
            place.send("b");
            place.session.commit();
            take(place.consumer(), "b");
            place.session.commit();
        }
    }

    static Connection connect(String uri, String container) throws JMSException {
        Connection connection = new JmsConnectionFactory("guest", "guest", uri).createConnection();
        connection.setClientID(container);
        connection.start();
        return connection;
    }

    /** failover.py has the scenario and the output. The client recovers by itself. */
    static void failover(String[] uris, String queue, int count) throws Exception {
        List<Integer> confirmed = new ArrayList<>();
        Set<Integer> resent = new TreeSet<>();
        List<String> delivered = Collections.synchronizedList(new ArrayList<>());
        Set<Integer> seen = ConcurrentHashMap.newKeySet();
        CountDownLatch done = new CountDownLatch(1);
        String options = "?failover.reconnectDelay=50&failover.useReconnectBackOff=false";
        Connection consuming = connect("failover:(" + uris[2] + "," + uris[1] + "," + uris[0] + ")"
                + options, "consumer");
        Session session = consuming.createSession(Session.AUTO_ACKNOWLEDGE);
        session.createConsumer(queue(session, queue)).setMessageListener(message -> {
            try {
                int number = Integer.parseInt(((TextMessage) message).getText());
                delivered.add("[" + number + ", " + (message.getJMSRedelivered() ? 1 : 0) + "]");
                seen.add(number);
                if (seen.size() == count) done.countDown();
            } catch (JMSException error) {
                throw new java.lang.IllegalStateException(error);
            }
        });
        Connection publishing = connect("failover:(" + String.join(",", uris) + ")" + options, "publisher");
        Session sending = publishing.createSession(Session.AUTO_ACKNOWLEDGE);
        MessageProducer producer = sending.createProducer(queue(sending, queue));
        while (confirmed.size() < count) {
            int number = confirmed.size();
            // A send that a lost connection interrupts is sent again by the client itself.
            resent.add(number);
            try {
                producer.send(sending.createTextMessage("" + number));
            } catch (JMSException error) {
                Thread.sleep(50);
                continue;
            }
            confirmed.add(number);
            if (number == count / 3) System.out.println("third");
        }
        done.await();
        System.out.println("{\"confirmed\": " + confirmed + ", \"resent\": " + resent
                + ", \"delivered\": " + delivered + "}");
    }

    public static void main(String[] words) throws Exception {
        String[] uris = words[1].replaceAll("//[^@]*@", "//").split(",");
        if (words[0].equals("probe")) {
            new Jms(connect(uris[0], "probes"), words[2]).probes();
        } else {
            failover(uris, words[2], Integer.parseInt(words[3]));
        }
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
