// Sends and consumes until its input has a line, then consumes until it is ended. Prints `sent BODY`
// for what was confirmed and `got QUEUE OFFSET BODY`. A body is `go:QUEUE:NUMBER`.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

var lock sync.Mutex

func say(format string, values ...any) {
	lock.Lock()
	defer lock.Unlock()
	fmt.Printf(format+"\n", values...)
}

func main() {
	rlog.SetLogLevel("error")
	servers, topic := []string{os.Args[1]}, os.Args[2]
	reader, err := rocketmq.NewPushConsumer(
		consumer.WithNameServer(servers), consumer.WithGroupName("go-movers"),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))
	if err != nil {
		panic(err)
	}
	err = reader.Subscribe(topic, consumer.MessageSelector{}, func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		for _, each := range messages {
			say("got %d %d %s", each.Queue.QueueId, each.QueueOffset, each.Body)
		}
		return consumer.ConsumeSuccess, nil
	})
	if err != nil {
		panic(err)
	}
	if err = reader.Start(); err != nil {
		panic(err)
	}
	writer, err := rocketmq.NewProducer(producer.WithNameServer(servers), producer.WithRetry(2),
		producer.WithGroupName("go-producers"), producer.WithQueueSelector(producer.NewManualQueueSelector()))
	if err != nil {
		panic(err)
	}
	if err = writer.Start(); err != nil {
		panic(err)
	}
	var ended atomic.Bool
	go func() {
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		ended.Store(true)
	}()
	brokers := os.Args[3]
	for i := 0; !ended.Load(); i++ {
		body := fmt.Sprintf("go:%d:%d", i%4, i/4)
		for {
			message := primitive.NewMessage(topic, []byte(body))
			message.Queue = &primitive.MessageQueue{Topic: topic, BrokerName: brokers, QueueId: i % 4}
			result, err := writer.SendSync(context.Background(), message)
			if err == nil && result.Status == primitive.SendOK {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		say("sent %s", body)
		time.Sleep(20 * time.Millisecond)
	}
	say("done")
	select {}
}
