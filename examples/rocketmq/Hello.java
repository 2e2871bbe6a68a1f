// Sends five messages and consumes them, with RocketMQ's Java client (rocketmq-client 5.3):
//
//     java -cp 'build/rocketmq/*' examples/rocketmq/Hello.java 127.0.0.1:9876

import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

public class Hello {
    public static void main(String[] arguments) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("hello-producers");
        producer.setNamesrvAddr(arguments[0]);
        producer.start();
        for (int n = 0; n < 5; n++) {
            Message message = new Message("hello-java", ("hello " + n).getBytes());
            System.out.println(producer.send(message).getSendStatus());
        }
        CountDownLatch left = new CountDownLatch(5);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("hello-java-consumers");
        consumer.setNamesrvAddr(arguments[0]);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe("hello-java", "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                System.out.println("received " + new String(message.getBody()));
                left.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        left.await();
        consumer.shutdown();
        producer.shutdown();
    }
}
