// What the programs for RocketMQ's own Java client share: each step prints one line, `ok NAME` or
// `bad NAME WHY`.

import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;

class Steps {
    static String servers;
    static DefaultMQProducer producer;

    interface Step { void run() throws Exception; }

    static void step(String name, Step step) {
        try {
            step.run();
            System.out.println("ok " + name);
        } catch (Throwable error) {
            System.out.println("bad " + name + " " + error);
            error.printStackTrace();
        }
    }

    static void check(boolean holds, String text) {
        if (!holds) throw new IllegalStateException(text);
    }

    static void begin(String address, String group) throws Exception {
        servers = address;
        producer = new DefaultMQProducer(group);
        producer.setNamesrvAddr(servers);
        producer.setSendMsgTimeout(10000);
        producer.start();
    }

    static void end() {
        producer.shutdown();
        System.out.println("end");
        System.exit(0);
    }

    static DefaultMQPushConsumer consumer(String group) throws Exception {
        DefaultMQPushConsumer made = new DefaultMQPushConsumer(group);
        made.setNamesrvAddr(servers);
        made.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return made;
    }
}
