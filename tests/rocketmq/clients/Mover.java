// Sends and consumes for as long as its input is open, then consumes until it is ended. Prints
// `sent BODY` for what was confirmed and `got QUEUE OFFSET BODY`. A body is `java:QUEUE:NUMBER`.

import java.util.*;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.consumer.listener.*;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.*;

public class Mover {
    public static void main(String[] arguments) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("java-movers");
        consumer.setNamesrvAddr(arguments[0]);
        consumer.setConsumeThreadMin(4);
        consumer.setConsumeThreadMax(4);
        consumer.setPollNameServerInterval(1000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(arguments[1], "*");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            for (MessageExt each : messages) {
                say("got " + each.getQueueId() + " " + each.getQueueOffset() + " " + new String(each.getBody()));
            }
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        DefaultMQProducer producer = new DefaultMQProducer("java-producers");
        producer.setNamesrvAddr(arguments[0]);
        producer.setPollNameServerInterval(1000);
        producer.start();
        int[] next = new int[4];
        for (int i = 0; ; i = (i + 1) % 4) {
            String body = "java:" + i + ":" + next[i]++;
            while (!sent(producer, new Message(arguments[1], body.getBytes()), i)) Thread.sleep(100);
            say("sent " + body);
            if (System.in.available() > 0) break;
            Thread.sleep(20);
        }
        say("done");
    }

    static boolean sent(DefaultMQProducer producer, Message message, int queue) {
        try {
            SendResult result = producer.send(message, (queues, each, id) -> of(queues, (int) id), queue);
            return result.getSendStatus() == SendStatus.SEND_OK;
        } catch (Exception error) {
            System.err.println(error.getMessage());
            return false;
        }
    }

    static MessageQueue of(List<MessageQueue> queues, int id) {
        for (MessageQueue each : queues) if (each.getQueueId() == id) return each;
        throw new IllegalStateException("no queue " + id);
    }

    static synchronized void say(String line) {
        System.out.println(line);
    }
}
