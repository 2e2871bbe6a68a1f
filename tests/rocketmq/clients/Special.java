// RocketMQ's own Java client: delayed and timed messages, transactions, pop consumers.

import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.consumer.listener.*;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

public class Special extends Steps {
    static String broker;

    static Message message(String topic, String body) {
        return new Message(topic, body.getBytes());
    }

    static DefaultMQPushConsumer consumer(String group, String topic) throws Exception {
        DefaultMQPushConsumer made = consumer(group);
        made.subscribe(topic, "*");
        return made;
    }

    static void await(BooleanSupplier done, String text) throws Exception {
        long end = System.currentTimeMillis() + 120000;
        while (!done.getAsBoolean()) {
            check(System.currentTimeMillis() < end, text);
            Thread.sleep(50);
        }
    }

    interface BooleanSupplier { boolean getAsBoolean(); }

    public static void main(String[] arguments) throws Exception {
        broker = arguments[1];
        begin(arguments[0], "special-producers");
        step("delay", Special::delay);
        step("timed", Special::timed);
        step("transaction", Special::transaction);
        step("retry", Special::retry);
        step("pop", Special::pop);
        step("popOrderly", Special::popOrderly);
        end();
    }

    static Map<String, Long> arrivals(String group, String topic, int count) throws Exception {
        Map<String, Long> times = new ConcurrentHashMap<>();
        AtomicInteger repeats = new AtomicInteger();
        DefaultMQPushConsumer consumer = consumer(group, topic);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt found : messages) {
                Long before = times.put(new String(found.getBody()), System.currentTimeMillis());
                if (before != null) repeats.incrementAndGet();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        await(() -> times.size() >= count, "only " + times.size() + " of " + count);
        consumer.shutdown();
        check(repeats.get() == 0, repeats + " repeats");
        return times;
    }

    static void delay() throws Exception {
        producer.send(message("special-delay", "now"));
        long begin = System.currentTimeMillis();
        for (int level = 1; level <= 3; level++) {
            Message message = message("special-delay", "" + level);
            message.setDelayTimeLevel(level);
            producer.send(message);
        }
        Map<String, Long> times = arrivals("special-delay-group", "special-delay", 4);
        for (int level = 1; level <= 3; level++) {
            check(times.get("" + level) >= begin + 1000 * level, "level " + level + " was early");
        }
    }

    static void timed() throws Exception {
        producer.send(message("special-timed", "now"));
        long begin = System.currentTimeMillis();
        Message first = message("special-timed", "ms");
        first.setDelayTimeMs(1500);
        producer.send(first);
        Message second = message("special-timed", "at");
        second.setDeliverTimeMs(begin + 2500);
        producer.send(second);
        Message third = message("special-timed", "s");
        third.setDelayTimeSec(1);
        producer.send(third);
        Map<String, Long> times = arrivals("special-timed-group", "special-timed", 4);
        check(times.get("ms") >= begin + 1500, "ms was early");
        check(times.get("at") >= begin + 2500, "at was early");
        check(times.get("s") >= begin + 1000, "s was early");
        Message far = message("special-timed", "far");
        far.setDelayTimeSec(4 * 86400);
        try {
            producer.send(far);
            throw new IllegalStateException("four days were taken");
        } catch (org.apache.rocketmq.client.exception.MQBrokerException refused) {
            check(refused.getResponseCode() == 13, "" + refused);
        }
    }

    static void transaction() throws Exception {
        Map<String, AtomicInteger> checks = new ConcurrentHashMap<>();
        TransactionMQProducer made = new TransactionMQProducer("special-transactions");
        made.setNamesrvAddr(servers);
        made.setTransactionListener(new TransactionListener() {
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return (LocalTransactionState) argument;
            }
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                String body = new String(message.getBody());
                int count = checks.computeIfAbsent(body, b -> new AtomicInteger()).incrementAndGet();
                if (body.equals("checked-rollback")) return LocalTransactionState.ROLLBACK_MESSAGE;
                // Undecided the first time.
                return count < 2 ? LocalTransactionState.UNKNOW : LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        made.start();
        String topic = "special-transaction";
        made.sendMessageInTransaction(message(topic, "commit"), LocalTransactionState.COMMIT_MESSAGE);
        made.sendMessageInTransaction(message(topic, "rollback"), LocalTransactionState.ROLLBACK_MESSAGE);
        made.sendMessageInTransaction(message(topic, "checked"), LocalTransactionState.UNKNOW);
        made.sendMessageInTransaction(message(topic, "checked-rollback"), LocalTransactionState.UNKNOW);
        Map<String, Long> times = arrivals("special-transaction-group", topic, 2);
        check(times.keySet().equals(Set.of("commit", "checked")), "" + times.keySet());
        await(() -> checks.containsKey("checked-rollback"), "no check");
        check(checks.get("checked").get() >= 2, "checked once");
        made.shutdown();
    }

    static void retry() throws Exception {
        Map<String, AtomicInteger> seen = new ConcurrentHashMap<>();
        DefaultMQPushConsumer consumer = consumer("special-retry-group", "special-retry");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            context.setDelayLevelWhenNextConsume(1);
            for (MessageExt found : messages) {
                String body = new String(found.getBody());
                int count = seen.computeIfAbsent(body, b -> new AtomicInteger()).incrementAndGet();
                if (count != found.getReconsumeTimes() + 1) seen.put("wrong", new AtomicInteger());
                if (count < 3) return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.setConsumeMessageBatchMaxSize(1);
        producer.send(message("special-retry", "again"));
        consumer.start();
        await(() -> seen.containsKey("again") && seen.get("again").get() == 3, "" + seen);
        consumer.shutdown();
        check(!seen.containsKey("wrong"), "wrong counts");
    }

    static void popMode(String topic, String group) throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt();
        admin.setNamesrvAddr(servers);
        admin.setInstanceName("admin-" + group);
        admin.start();
        admin.setMessageRequestMode(broker, topic, group, MessageRequestMode.POP, 0, 10000);
        admin.shutdown();
    }

    static void pop() throws Exception {
        String topic = "special-pop", group = "special-pop-group";
        int count = 200;
        for (int i = 0; i < count; i++) producer.send(message(topic, "m" + i));
        popMode(topic, group);
        Map<String, AtomicInteger> seen = new ConcurrentHashMap<>();
        AtomicInteger failed = new AtomicInteger();
        DefaultMQPushConsumer consumer = consumer(group, topic);
        consumer.setClientRebalance(false);
        consumer.setPopInvisibleTime(10000);
        consumer.setConsumeMessageBatchMaxSize(1);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt found : messages) {
                String body = new String(found.getBody());
                int times = seen.computeIfAbsent(body, b -> new AtomicInteger()).incrementAndGet();
                if (found.getProperty("POP_CK") == null) seen.put("no receipt", new AtomicInteger());
                if (body.endsWith("7") && times == 1) {
                    failed.incrementAndGet();
                    return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        await(() -> seen.size() >= count, "only " + seen.size());
        await(() -> seen.entrySet().stream().allMatch(e ->
            !e.getKey().endsWith("7") || e.getValue().get() >= 2), "what failed did not come back");
        // Longer than messages are invisible: what was acknowledged must not come back.
        Thread.sleep(13000);
        consumer.shutdown();
        check(seen.size() == count, "" + seen.keySet());
        check(failed.get() == 20, failed + " failed");
        for (Map.Entry<String, AtomicInteger> each : seen.entrySet()) {
            int wanted = each.getKey().endsWith("7") ? 2 : 1;
            check(each.getValue().get() == wanted, each + " times");
        }
    }

    static void popOrderly() throws Exception {
        String topic = "special-pop-orderly", group = "special-pop-orderly-group";
        for (int i = 0; i < 40; i++) {
            producer.send(message(topic, "m" + i), (queues, message, key) -> queues.get(0), null);
        }
        popMode(topic, group);
        List<Integer> seen = Collections.synchronizedList(new ArrayList<>());
        AtomicInteger failures = new AtomicInteger();
        DefaultMQPushConsumer consumer = consumer(group, topic);
        consumer.setClientRebalance(false);
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            for (MessageExt found : messages) {
                int number = Integer.parseInt(new String(found.getBody()).substring(1));
                if (number == 5 && failures.getAndIncrement() < 1) {
                    return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
                }
                if (!seen.contains(number)) seen.add(number);
            }
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        await(() -> seen.size() == 40, "only " + seen);
        consumer.shutdown();
        for (int i = 0; i < 40; i++) check(seen.get(i) == i, "" + seen);
    }
}
