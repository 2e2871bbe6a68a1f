// RocketMQ's own Go client (v2) against a broker: each step prints `ok NAME` or `bad NAME WHY`.
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

var servers []string

func step(name string, run func() error) {
	if err := run(); err != nil {
		fmt.Println("bad", name, err)
		return
	}
	fmt.Println("ok", name)
}

func take(group, topic string, selector consumer.MessageSelector, count int, order bool) ([]string, error) {
	made, err := rocketmq.NewPushConsumer(
		consumer.WithNameServer(servers), consumer.WithGroupName(group),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumerOrder(order), consumer.WithInstance(group))
	if err != nil {
		return nil, err
	}
	var lock sync.Mutex
	seen := map[string]bool{}
	var bodies []string
	done := make(chan bool, 1)
	err = made.Subscribe(topic, selector, func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		lock.Lock()
		defer lock.Unlock()
		for _, message := range messages {
			if body := string(message.Body); !seen[body] {
				seen[body] = true
				bodies = append(bodies, body)
			}
		}
		if len(bodies) >= count {
			select {
			case done <- true:
			default:
			}
		}
		return consumer.ConsumeSuccess, nil
	})
	if err != nil {
		return nil, err
	}
	if err = made.Start(); err != nil {
		return nil, err
	}
	defer made.Shutdown()
	select {
	case <-done:
	case <-time.After(90 * time.Second):
		lock.Lock()
		defer lock.Unlock()
		return nil, fmt.Errorf("only %d of %d", len(bodies), count)
	}
	lock.Lock()
	defer lock.Unlock()
	return append([]string{}, bodies...), nil
}

func main() {
	rlog.SetLogLevel("error")
	servers = []string{os.Args[1]}
	made, err := rocketmq.NewProducer(
		producer.WithNameServer(servers), producer.WithRetry(2), producer.WithGroupName("go-producers"),
		producer.WithQueueSelector(producer.NewHashQueueSelector()))
	if err != nil {
		panic(err)
	}
	if err = made.Start(); err != nil {
		panic(err)
	}
	ctx := context.Background()
	step("send", func() error {
		for i := 0; i < 20; i++ {
			message := primitive.NewMessage("go-plain", []byte("m"+strconv.Itoa(i)))
			message.WithTag([]string{"even", "odd"}[i%2]).WithKeys([]string{"k" + strconv.Itoa(i)})
			result, err := made.SendSync(ctx, message)
			if err != nil {
				return err
			}
			if result.Status != primitive.SendOK || len(result.OffsetMsgID) != 32 {
				return fmt.Errorf("%v", result)
			}
		}
		return nil
	})
	step("batch", func() error {
		var messages []*primitive.Message
		for i := 0; i < 10; i++ {
			messages = append(messages, primitive.NewMessage("go-batch", []byte("b"+strconv.Itoa(i))))
		}
		if _, err := made.SendSync(ctx, messages...); err != nil {
			return err
		}
		_, err := take("go-batches", "go-batch", consumer.MessageSelector{}, 10, false)
		return err
	})
	step("push", func() error {
		_, err := take("go-all", "go-plain", consumer.MessageSelector{}, 20, false)
		return err
	})
	step("tags", func() error {
		bodies, err := take("go-odd", "go-plain", consumer.MessageSelector{Type: consumer.TAG, Expression: "odd"}, 10, false)
		for _, body := range bodies {
			if number, _ := strconv.Atoi(body[1:]); number%2 == 0 {
				return fmt.Errorf("%v", bodies)
			}
		}
		return err
	})
	step("ordered", func() error {
		for i := 0; i < 30; i++ {
			message := primitive.NewMessage("go-ordered", []byte(fmt.Sprintf("%d:%d", i%3, i/3)))
			message.WithShardingKey(strconv.Itoa(i % 3))
			if _, err := made.SendSync(ctx, message); err != nil {
				return err
			}
		}
		bodies, err := take("go-orders", "go-ordered", consumer.MessageSelector{}, 30, true)
		next := map[string]int{}
		for _, body := range bodies {
			parts := strings.Split(body, ":")
			if number, _ := strconv.Atoi(parts[1]); number != next[parts[0]] {
				return fmt.Errorf("%v", bodies)
			}
			next[parts[0]]++
		}
		return err
	})
	made.Shutdown()
	fmt.Println("end")
}
