// Publishes and consumes numbers with amqp091-go; see failover.py for the scenario and the output.
//
//	client "uri,uri,uri" QUEUE COUNT
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	window   = 50
	prefetch = 100
)

type ledger struct {
	Confirmed []int    `json:"confirmed"`
	Resent    []int    `json:"resent"`
	Delivered [][2]any `json:"delivered"`
}

var errLost = errors.New("connection lost")

// keepDoing calls work on one node after the other until it succeeds.
func keepDoing(uris []string, work func(*amqp.Channel) error) {
	for attempt := 0; ; attempt++ {
		connection, err := amqp.DialConfig(uris[attempt%len(uris)], amqp.Config{
			Dial:      amqp.DefaultDial(5 * time.Second),
			Heartbeat: 10 * time.Second,
			Locale:    "en_US",
		})
		if err == nil {
			var channel *amqp.Channel
			if channel, err = connection.Channel(); err == nil {
				err = work(channel)
			}
			connection.Close()
			if err == nil {
				return
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func publish(uris []string, queue string, count int, seen *ledger) {
	tried := map[int]bool{}
	keepDoing(uris, func(channel *amqp.Channel) error {
		if err := channel.Confirm(false); err != nil {
			return err
		}
		for len(seen.Confirmed) < count {
			start := len(seen.Confirmed)
			end := min(start+window, count)
			var pending []*amqp.DeferredConfirmation
			for number := start; number < end; number++ {
				if tried[number] {
					seen.Resent = append(seen.Resent, number)
				}
				tried[number] = true
				confirmation, err := channel.PublishWithDeferredConfirm("", queue, true, false,
					amqp.Publishing{DeliveryMode: amqp.Persistent, Body: []byte(strconv.Itoa(number))})
				if err != nil {
					return err
				}
				pending = append(pending, confirmation)
			}
			limit, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			for _, confirmation := range pending {
				acked, err := confirmation.WaitContext(limit)
				if err != nil || !acked {
					cancel()
					return errLost
				}
			}
			cancel()
			for number := start; number < end; number++ {
				seen.Confirmed = append(seen.Confirmed, number)
			}
			if start <= count/3 && count/3 < end {
				fmt.Println("third")
			}
		}
		return nil
	})
}

func consume(uris []string, queue string, count int, seen *ledger) {
	numbers := map[int]bool{}
	keepDoing(uris, func(channel *amqp.Channel) error {
		if err := channel.Qos(prefetch, 0, false); err != nil {
			return err
		}
		deliveries, err := channel.Consume(queue, "", false, false, false, false, nil)
		if err != nil {
			return err
		}
		for delivery := range deliveries {
			number, err := strconv.Atoi(string(delivery.Body))
			if err != nil {
				panic(err)
			}
			seen.Delivered = append(seen.Delivered, [2]any{number, delivery.Redelivered})
			if err := delivery.Ack(false); err != nil {
				return err
			}
			numbers[number] = true
			if len(numbers) == count {
				return nil
			}
		}
		return errLost
	})
}

func main() {
	uris, queue := strings.Split(os.Args[1], ","), os.Args[2]
	count, err := strconv.Atoi(os.Args[3])
	if err != nil {
		panic(err)
	}
	backwards := make([]string, 0, len(uris))
	for i := len(uris) - 1; i >= 0; i-- {
		backwards = append(backwards, uris[i])
	}
	seen := &ledger{}
	var both sync.WaitGroup
	both.Add(2)
	go func() { defer both.Done(); publish(uris, queue, count, seen) }()
	go func() { defer both.Done(); consume(backwards, queue, count, seen) }()
	both.Wait()
	text, err := json.Marshal(seen)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(text))
}
