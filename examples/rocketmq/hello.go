// Sends five messages and consumes them, with RocketMQ's Go client:
//
//	go mod init hello && go get github.com/apache/rocketmq-client-go/v2@v2.1.2
//	go run hello.go 127.0.0.1:9876
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	rlog.SetLogLevel("error")
	names := []string{os.Args[1]}
	sender, err := rocketmq.NewProducer(producer.WithNameServer(names))
	must(err)
	must(sender.Start())
	for n := 0; n < 5; n++ {
		body := fmt.Sprintf("hello %d", n)
		_, err := sender.SendSync(context.Background(), primitive.NewMessage("hello-go", []byte(body)))
		must(err)
	}
	received := make(chan string)
	receiver, err := rocketmq.NewPushConsumer(
		consumer.WithNameServer(names), consumer.WithGroupName("hello-go-consumers"),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))
	must(err)
	must(receiver.Subscribe("hello-go", consumer.MessageSelector{},
		func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			for _, message := range messages {
				received <- string(message.Body)
			}
			return consumer.ConsumeSuccess, nil
		}))
	must(receiver.Start())
	for n := 0; n < 5; n++ {
		fmt.Println("received", <-received)
	}
}
