import java.util.Arrays;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;

/** Loads a broker group with RocketMQ's client: threads that wait for each answer, or a consumer. */
public class GroupLoad {
    public static void main(String[] words) {
        try {
            run(words);
            System.exit(0);
        } catch (Exception error) {
            error.printStackTrace();
            System.exit(1);
        }
    }

    static void run(String[] words) throws Exception {
        if (words[0].equals("produce")) {
            produce(words[1], words[2], Integer.parseInt(words[3]), Integer.parseInt(words[4]),
                    Double.parseDouble(words[5]), Double.parseDouble(words[6]));
        } else {
            consume(words[1], words[2], Integer.parseInt(words[3]));
        }
    }

    /** Says "begin" when it is warm, "end" when its time is over, and then what was answered. */
    static void produce(String names, String topic, int threads, int size, double warm,
                        double seconds) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("load");
        producer.setNamesrvAddr(names);
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setSendMsgTimeout(30000);
        producer.start();
        byte[] body = new byte[size];
        Arrays.fill(body, (byte) 'x');
        AtomicBoolean counts = new AtomicBoolean();
        AtomicBoolean ended = new AtomicBoolean();
        AtomicLong failed = new AtomicLong();
        long[][] took = new long[threads][1 << 17];
        int[] number = new int[threads];
        Thread[] all = new Thread[threads];
        for (int i = 0; i < threads; i++) {
            int own = i;
            all[i] = new Thread(() -> {
                while (!ended.get()) {
                    long start = System.nanoTime();
                    try {
                        if (producer.send(new Message(topic, body)).getSendStatus() != SendStatus.SEND_OK) {
                            failed.incrementAndGet();
                            continue;
                        }
                    } catch (Exception error) {
                        if (failed.incrementAndGet() < 4) System.err.println(error);
                        continue;
                    }
                    if (counts.get() && !ended.get() && number[own] < took[own].length) {
                        took[own][number[own]++] = System.nanoTime() - start;
                    }
                }
            });
            all[i].start();
        }
        Thread.sleep((long) (warm * 1000));
        counts.set(true);
        System.out.println("begin");
        Thread.sleep((long) (seconds * 1000));
        ended.set(true);
        System.out.println("end");
        for (Thread each : all) each.join();
        int total = 0;
        for (int each : number) total += each;
        long[] sorted = new long[total];
        int at = 0;
        for (int i = 0; i < threads; i++) {
            System.arraycopy(took[i], 0, sorted, at, number[i]);
            at += number[i];
        }
        Arrays.sort(sorted);
        System.out.printf("{\"sent\": %d, \"failed\": %d, \"p50_ms\": %.3f, \"p99_ms\": %.3f}%n", total,
                failed.get(), at(sorted, 0.5), at(sorted, 0.99));
        producer.shutdown();
    }

    static double at(long[] sorted, double share) {
        return sorted.length == 0 ? 0 : sorted[(int) (sorted.length * share)] / 1e6;
    }

    /** Consumes so many messages that lie there; says "begin" at the first and "end" at the last. */
    static void consume(String names, String topic, int wanted) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("readers");
        consumer.setNamesrvAddr(names);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.setConsumeMessageBatchMaxSize(32);
        consumer.setPullBatchSize(32);
        AtomicInteger seen = new AtomicInteger();
        CountDownLatch done = new CountDownLatch(1);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            int before = seen.getAndAdd(messages.size());
            if (before == 0) System.out.println("begin");
            if (before < wanted && before + messages.size() >= wanted) {
                System.out.println("end");
                done.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        done.await();
        System.out.printf("{\"consumed\": %d}%n", wanted);
    }
}
