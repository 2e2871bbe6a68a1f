// RocketMQ's own Java client against a broker.

import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.consumer.listener.*;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.*;

public class Peer extends Steps {
    static Message message(String topic, String tags, String keys, String body) {
        return new Message(topic, tags, keys, body.getBytes());
    }

    static Set<String> take(DefaultMQPushConsumer consumer, int count) throws Exception {
        Set<String> bodies = ConcurrentHashMap.newKeySet();
        CountDownLatch left = new CountDownLatch(count);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                if (bodies.add(new String(message.getBody()))) left.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        boolean done = left.await(60, TimeUnit.SECONDS);
        consumer.shutdown();
        check(done, "only " + bodies.size() + " of " + count);
        return bodies;
    }

    public static void main(String[] arguments) throws Exception {
        begin(arguments[0], "java-producers");
        Map<String, Step> steps = new LinkedHashMap<>();
        steps.put("send", Peer::send);
        steps.put("tags", Peer::tags);
        steps.put("batch", Peer::batch);
        steps.put("ordered", Peer::ordered);
        steps.put("pull", Peer::pull);
        steps.put("query", Peer::query);
        steps.put("sql", Peer::sql);
        steps.put("broadcast", Peer::broadcast);
        steps.put("request", Peer::request);
        steps.put("rebalance", Peer::rebalance);
        steps.put("large", Peer::large);
        for (Map.Entry<String, Step> each : steps.entrySet()) {
            step(each.getKey(), each.getValue());
        }
        end();
    }

    static void send() throws Exception {
        CountDownLatch left = new CountDownLatch(20);
        for (int i = 0; i < 40; i++) {
            Message message = message("java-plain", i % 2 == 0 ? "even" : "odd", "key" + i, "m" + i);
            if (i < 20) {
                SendResult result = producer.send(message);
                check(result.getSendStatus() == SendStatus.SEND_OK, "" + result);
                check(result.getOffsetMsgId().length() == 32, "" + result);
            } else {
                producer.send(message, new SendCallback() {
                    public void onSuccess(SendResult result) { left.countDown(); }
                    public void onException(Throwable error) { error.printStackTrace(); }
                });
            }
        }
        check(left.await(30, TimeUnit.SECONDS), "no answer to asynchronous sends");
        producer.sendOneway(message("java-plain", "even", "", "oneway"));
    }

    static void tags() throws Exception {
        DefaultMQPushConsumer all = consumer("java-all");
        all.subscribe("java-plain", "*");
        check(take(all, 41).contains("oneway"), "one-way");
        DefaultMQPushConsumer odd = consumer("java-odd");
        odd.subscribe("java-plain", "odd || none");
        for (String body : take(odd, 20)) check(Integer.parseInt(body.substring(1)) % 2 == 1, body);
    }

    static void batch() throws Exception {
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < 10; i++) messages.add(message("java-batch", "t", "k" + i, "b" + i));
        SendResult result = producer.send(messages);
        check(result.getSendStatus() == SendStatus.SEND_OK, "" + result);
        check(result.getOffsetMsgId().split(",").length == 10, "" + result);
        DefaultMQPushConsumer all = consumer("java-batches");
        all.subscribe("java-batch", "t");
        take(all, 10);
    }

    static void ordered() throws Exception {
        for (int i = 0; i < 60; i++) {
            int key = i % 3;
            producer.send(message("java-ordered", "t", "", key + ":" + i / 3),
                (queues, message, argument) -> queues.get((Integer) argument % queues.size()), key);
        }
        DefaultMQPushConsumer made = consumer("java-orders");
        made.subscribe("java-ordered", "*");
        Map<String, List<Integer>> seen = new ConcurrentHashMap<>();
        CountDownLatch left = new CountDownLatch(60);
        made.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            for (MessageExt message : messages) {
                String[] parts = new String(message.getBody()).split(":");
                seen.computeIfAbsent(parts[0], k -> Collections.synchronizedList(new ArrayList<>()))
                    .add(Integer.parseInt(parts[1]));
                left.countDown();
            }
            return ConsumeOrderlyStatus.SUCCESS;
        });
        made.start();
        boolean done = left.await(60, TimeUnit.SECONDS);
        made.shutdown();
        check(done, "only " + seen);
        for (List<Integer> numbers : seen.values()) {
            for (int i = 0; i < numbers.size(); i++) check(numbers.get(i) == i, "" + numbers);
        }
    }

    static void pull() throws Exception {
        producer.send(message("java-pull", "", "", "p0"));
        DefaultLitePullConsumer made = new DefaultLitePullConsumer("java-pulls");
        made.setNamesrvAddr(servers);
        made.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        made.setAutoCommit(false);
        made.subscribe("java-pull", "*");
        made.start();
        List<MessageExt> found = new ArrayList<>();
        for (int i = 0; i < 30 && found.isEmpty(); i++) found.addAll(made.poll(1000));
        made.commitSync();
        made.shutdown();
        check(found.size() == 1, "" + found);
    }

    static void query() throws Exception {
        SendResult sent = producer.send(message("java-query", "t", "needle", "found"));
        MessageExt viewed = producer.viewMessage("java-query", sent.getOffsetMsgId());
        check(new String(viewed.getBody()).equals("found"), "" + viewed);
        long now = System.currentTimeMillis();
        for (int i = 0; ; i++) {
            try {
                QueryResult result = producer.queryMessage("java-query", "needle", 8, now - 100000, now + 100000);
                check(result.getMessageList().size() == 1, "" + result);
                break;
            } catch (Exception error) {
                if (i > 20) throw error;
                Thread.sleep(500);
            }
        }
    }

    static void sql() throws Exception {
        for (int i = 0; i < 10; i++) {
            Message message = message("java-sql", "", "", "s" + i);
            message.putUserProperty("n", "" + i);
            producer.send(message);
        }
        DefaultMQPushConsumer made = consumer("java-sqls");
        made.subscribe("java-sql", MessageSelector.bySql("n BETWEEN 3 AND 6 OR n = '9'"));
        check(take(made, 5).contains("s9"), "s9");
    }

    static void broadcast() throws Exception {
        producer.send(message("java-broadcast", "", "", "b"));
        DefaultMQPushConsumer made = consumer("java-broadcasts");
        made.setMessageModel(org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel.BROADCASTING);
        made.subscribe("java-broadcast", "*");
        CountDownLatch left = new CountDownLatch(1);
        made.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            left.countDown();
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        made.start();
        // It begins at the end of the topic, wherever that is then.
        boolean done = false;
        for (int i = 0; i < 60 && !done; i++) {
            producer.send(message("java-broadcast", "", "", "c"));
            done = left.await(1, TimeUnit.SECONDS);
        }
        made.shutdown();
        check(done, "nothing");
    }

    static void request() throws Exception {
        producer.send(message("java-request", "", "", "first"));
        DefaultMQPushConsumer made = consumer("java-requests");
        made.subscribe("java-request", "*");
        CompletableFuture<SendResult> replied = new CompletableFuture<>();
        made.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                if (message.getProperty("REPLY_TO_CLIENT") == null) continue;
                try {
                    replied.complete(producer.send(org.apache.rocketmq.client.utils.MessageUtil
                        .createReplyMessage(message, "answer".getBytes()), 10000));
                } catch (Exception error) {
                    replied.completeExceptionally(error);
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        made.start();
        try {
            producer.request(message("java-request", "", "", "question"), 30000);
        } catch (org.apache.rocketmq.client.exception.RequestTimeoutException tooEarly) {
            // 5.3.3 waits no longer than until the request is sent. The broker confirms a reply
            // when the client that asked has taken it.
        }
        SendResult result = replied.get(60, TimeUnit.SECONDS);
        made.shutdown();
        check(result.getSendStatus() == SendStatus.SEND_OK, "" + result);
    }

    static void rebalance() throws Exception {
        producer.send(message("java-balance", "", "", "x"));
        List<DefaultMQPushConsumer> all = new ArrayList<>();
        for (int i = 0; i < 2; i++) {
            DefaultMQPushConsumer made = consumer("java-balances");
            made.setInstanceName("instance" + i);
            made.subscribe("java-balance", "*");
            made.registerMessageListener((MessageListenerConcurrently) (m, c) -> ConsumeConcurrentlyStatus.CONSUME_SUCCESS);
            made.start();
            all.add(made);
        }
        boolean shared = false;
        for (int i = 0; i < 80 && !shared; i++) {
            Thread.sleep(250);
            int one = owned(all.get(0)), other = owned(all.get(1));
            shared = one > 0 && other > 0 && one + other == 4;
        }
        for (DefaultMQPushConsumer each : all) each.shutdown();
        check(shared, "queues are not shared");
    }

    static int owned(DefaultMQPushConsumer consumer) {
        int count = 0;
        for (MessageQueue queue : consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet()) {
            if (queue.getTopic().equals("java-balance")) count++;
        }
        return count;
    }

    static void large() throws Exception {
        byte[] body = new byte[1 << 20];
        new Random(1).nextBytes(body);
        producer.send(new Message("java-large", body));
        char[] letters = new char[1 << 20];
        Arrays.fill(letters, 'x');
        producer.send(new Message("java-large", new String(letters).getBytes()));
        DefaultMQPushConsumer made = consumer("java-larges");
        made.subscribe("java-large", "*");
        take(made, 2);
    }
}
