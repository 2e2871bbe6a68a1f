// Drives a broker with Azure's go-amqp; see ../../test_clients.py for the behaviours and the output.
//
//	client probe URI STEM
//	client failover "uri,uri,uri" QUEUE COUNT
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/Azure/go-amqp"
)

const (
	patience = 30 * time.Second
	window   = 50
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func expect(found, wanted any) {
	if !reflect.DeepEqual(found, wanted) {
		panic(fmt.Sprintf("%#v (%T) where %#v (%T) is due", found, found, wanted, wanted))
	}
}

func within() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	time.AfterFunc(patience, cancel)
	return ctx
}

type probe struct {
	stem    string
	session *amqp.Session
}

func (p *probe) address(queue string) string { return "/queues/" + p.stem + "." + queue }

func (p *probe) sender(address string, options *amqp.SenderOptions) *amqp.Sender {
	sender, err := p.session.NewSender(within(), address, options)
	check(err)
	return sender
}

func (p *probe) receiver(queue string, credit int32) *amqp.Receiver {
	options := &amqp.ReceiverOptions{Credit: credit}
	receiver, err := p.session.NewReceiver(within(), p.address(queue), options)
	check(err)
	return receiver
}

func (p *probe) send(queue string, messages ...*amqp.Message) {
	sender := p.sender(p.address(queue), nil)
	for _, message := range messages {
		check(sender.Send(within(), message, nil))
	}
	check(sender.Close(within()))
}

func text(body string) *amqp.Message { return amqp.NewMessage([]byte(body)) }

func receive(receiver *amqp.Receiver) *amqp.Message {
	message, err := receiver.Receive(within(), nil)
	check(err)
	return message
}

// take receives a message, accepts it, and checks its body.
func take(receiver *amqp.Receiver, body string) *amqp.Message {
	message := receive(receiver)
	expect(string(message.GetData()), body)
	check(receiver.AcceptMessage(within(), message))
	return message
}

func failed(message *amqp.Message) uint32 {
	if message.Header == nil {
		return 0
	}
	return message.Header.DeliveryCount
}

func pointer[T any](value T) *T { return &value }

func (p *probe) accepted() {
	p.send("accepted", text("a"), text("b"))
	receiver := p.receiver("accepted", 10)
	take(receiver, "a")
	take(receiver, "b")
	check(receiver.Close(within()))
}

// outcome sends a message and returns what the broker says of it.
func outcome(sender *amqp.Sender, message *amqp.Message) amqp.DeliveryState {
	receipt, err := sender.SendWithReceipt(within(), message, nil)
	check(err)
	state, err := receipt.Wait(within())
	check(err)
	return state
}

func (p *probe) released() {
	state := outcome(p.sender("/exchanges/amq.direct/nothing", nil), text("x"))
	expect(state, &amqp.StateReleased{})
}

func (p *probe) rejected() {
	sender := p.sender(p.address("full"), nil)
	for {
		switch state := outcome(sender, text("x")).(type) {
		case *amqp.StateAccepted:
		case *amqp.StateRejected:
			expect(state.Error.Condition, amqp.ErrCondResourceLimitExceeded)
			expect(state.Error.Info["reason"], any("maxlen"))
			return
		default:
			panic(fmt.Sprint(state))
		}
	}
}

func (p *probe) settled() {
	sender := p.sender(p.address("settled"), &amqp.SenderOptions{
		SettlementMode: amqp.SenderSettleModeSettled.Ptr(),
	})
	for _, body := range []string{"a", "b"} {
		check(sender.Send(within(), text(body), nil))
	}
	options := &amqp.ReceiverOptions{
		Credit: 5, RequestedSenderSettleMode: amqp.SenderSettleModeSettled.Ptr(),
	}
	receiver, err := p.session.NewReceiver(within(), p.address("settled"), options)
	check(err)
	for _, body := range []string{"a", "b"} {
		expect(string(receive(receiver).GetData()), body)
	}
	check(receiver.Close(within()))
}

func (p *probe) release() {
	p.send("release", text("again"))
	receiver := p.receiver("release", 1)
	check(receiver.ReleaseMessage(within(), receive(receiver)))
	again := take(receiver, "again")
	expect(failed(again), uint32(0))
	expect(again.Header.FirstAcquirer, false)
}

func (p *probe) reject() {
	p.send("reject", text("bad"))
	receiver := p.receiver("reject", 1)
	check(receiver.RejectMessage(within(), receive(receiver), &amqp.Error{
		Condition: "my:condition", Description: "why",
	}))
	letter := take(p.receiver("dead", 1), "bad")
	expect(letter.Annotations["x-first-death-reason"], any("rejected"))
}

func (p *probe) modify() {
	p.send("modify", text("again"))
	receiver := p.receiver("modify", 1)
	check(receiver.ModifyMessage(within(), receive(receiver), &amqp.ModifyMessageOptions{
		DeliveryFailed: true, Annotations: amqp.Annotations{"x-opt-mine": "kept"},
	}))
	again := take(receiver, "again")
	expect(failed(again), uint32(1))
	expect(again.Annotations["x-opt-mine"], any("kept"))
}

func (p *probe) credit() {
	p.send("credit", text("a"), text("b"), text("c"))
	receiver := p.receiver("credit", -1)
	check(receiver.IssueCredit(2))
	take(receiver, "a")
	take(receiver, "b")
	short, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if more, err := receiver.Receive(short, nil); err == nil {
		panic("more than its credit: " + string(more.GetData()))
	}
	check(receiver.IssueCredit(1))
	take(receiver, "c")
}

func (p *probe) drain() {
	p.send("drain", text("a"), text("b"))
	receiver := p.receiver("drain", -1)
	check(receiver.IssueCredit(50))
	take(receiver, "a")
	take(receiver, "b")
	check(receiver.DrainCredit(within(), nil))
	check(receiver.IssueCredit(1))
	p.send("drain", text("c"))
	take(receiver, "c")
}

func (p *probe) large() {
	body := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	p.send("large", amqp.NewMessage(body))
	message := receive(p.receiver("large", 1))
	expect(bytes.Equal(message.GetData(), body), true)
}

func (p *probe) types() {
	now := time.UnixMilli(1_700_000_000_123)
	properties := map[string]any{
		"null": nil, "true": true, "ubyte": uint8(200), "ushort": uint16(60_000),
		"uint": uint32(4_000_000_000), "ulong": uint64(1) << 63, "byte": int8(-100),
		"short": int16(-30_000), "int": int32(-5), "long": int64(-1) << 62, "float": float32(1.5),
		"double": 2.25, "time": now, "uuid": amqp.UUID{1, 2, 3}, "binary": []byte{0, 255},
		"text": "ü",
	}
	message := text("x")
	message.ApplicationProperties = properties
	message.Annotations = amqp.Annotations{"x-opt-list": []any{"a", int64(2)}}
	message.Header = &amqp.MessageHeader{Durable: true, Priority: 3, TTL: time.Hour}
	message.Properties = &amqp.MessageProperties{
		MessageID: amqp.UUID{9}, Subject: pointer("s"), ReplyTo: pointer("/queues/r"),
		CorrelationID: uint64(7), ContentType: pointer("text/plain"),
		ContentEncoding: pointer("none"), GroupID: pointer("g"), GroupSequence: pointer(uint32(5)),
		CreationTime: &now, AbsoluteExpiryTime: &now, To: pointer("/queues/t"),
		ReplyToGroupID: pointer("rg"),
	}
	p.send("types", message)
	found := take(p.receiver("types", 1), "x")
	for name, value := range properties {
		expect(found.ApplicationProperties[name], value)
	}
	expect(len(found.ApplicationProperties), len(properties))
	expect(found.Annotations["x-opt-list"], message.Annotations["x-opt-list"])
	expect(*found.Properties, *message.Properties)
	expect(found.Header.Priority, uint8(3))
	expect(found.Header.TTL, time.Hour)
	expect(found.Header.Durable, true)
}

func (p *probe) bodies() {
	several := &amqp.Message{Data: [][]byte{[]byte("a"), []byte("b")}}
	value := &amqp.Message{Value: map[string]any{"k": int64(1)}}
	sequence := &amqp.Message{Sequence: [][]any{{"a", true}, {int64(5)}}}
	p.send("bodies", several, value, sequence)
	receiver := p.receiver("bodies", 3)
	expect(receive(receiver).Data, several.Data)
	expect(receive(receiver).Value, value.Value)
	expect(receive(receiver).Sequence, sequence.Sequence)
}

func (p *probe) anonymous() {
	sender := p.sender("", nil)
	message := text("x")
	message.Properties = &amqp.MessageProperties{To: pointer(p.address("anonymous"))}
	check(sender.Send(within(), message, nil))
	take(p.receiver("anonymous", 1), "x")
}

func (p *probe) temporary() {
	receiver, err := p.session.NewReceiver(within(), "", &amqp.ReceiverOptions{
		DynamicAddress: true, SourceCapabilities: []string{"temporary-queue"}, Credit: 1,
	})
	check(err)
	check(p.sender(receiver.Address(), nil).Send(within(), text("x"), nil))
	take(receiver, "x")
}

func (p *probe) stream() {
	p.send("stream", text("a"), text("b"), text("c"))
	receiver, err := p.session.NewReceiver(within(), p.address("stream"), &amqp.ReceiverOptions{
		Credit: 3, Filters: []amqp.LinkFilter{
			amqp.NewLinkFilter("rabbitmq:stream-offset-spec", 0, int64(1)),
		},
	})
	check(err)
	take(receiver, "b")
	expect(take(receiver, "c").Annotations["x-stream-offset"], any(int64(2)))
}

func (p *probe) refused() {
	_, err := p.session.NewReceiver(within(), "/queues/none", nil)
	var refusal *amqp.Error
	if !errors.As(err, &refusal) {
		panic(fmt.Sprint("not refused: ", err))
	}
	expect(refusal.Condition, amqp.ErrCondNotFound)
	p.send("refused", text("the session lives"))
}

func probes(uri, stem string) {
	connection, err := amqp.Dial(within(), uri, &amqp.ConnOptions{MaxFrameSize: 4096})
	check(err)
	session, err := connection.NewSession(within(), nil)
	check(err)
	p := &probe{stem, session}
	for _, each := range []struct {
		name string
		run  func()
	}{
		{"accepted", p.accepted}, {"released", p.released}, {"rejected", p.rejected},
		{"settled", p.settled}, {"release", p.release}, {"reject", p.reject}, {"modify", p.modify},
		{"credit", p.credit}, {"drain", p.drain}, {"large", p.large}, {"types", p.types},
		{"bodies", p.bodies}, {"anonymous", p.anonymous}, {"temporary", p.temporary},
		{"stream", p.stream}, {"refused", p.refused},
	} {
		fault := attempt(each.run)
		line, err := json.Marshal(map[string]string{"name": each.name, "fault": fault})
		check(err)
		fmt.Println(string(line))
	}
	check(connection.Close())
}

func attempt(run func()) (fault string) {
	defer func() {
		if found := recover(); found != nil {
			fault = fmt.Sprint(found)
		}
	}()
	run()
	return ""
}

// failover.py has the scenario and the output.
type ledger struct {
	Confirmed []int    `json:"confirmed"`
	Resent    []int    `json:"resent"`
	Delivered [][2]int `json:"delivered"`
}

// keepDoing runs work on one node after the other until it succeeds.
func keepDoing(uris []string, work func(*amqp.Session) error) {
	for at := 0; ; at++ {
		connection, err := amqp.Dial(within(), uris[at%len(uris)], nil)
		if err == nil {
			var session *amqp.Session
			if session, err = connection.NewSession(within(), nil); err == nil {
				err = work(session)
			}
			_ = connection.Close()
		}
		if err == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (l *ledger) publish(uris []string, queue string, count int) {
	tried := map[int]bool{}
	keepDoing(uris, func(session *amqp.Session) error {
		sender, err := session.NewSender(within(), "/queues/"+queue, nil)
		if err != nil {
			return err
		}
		for len(l.Confirmed) < count {
			start := len(l.Confirmed)
			end := min(start+window, count)
			var receipts []amqp.SendReceipt
			for number := start; number < end; number++ {
				if tried[number] {
					l.Resent = append(l.Resent, number)
				}
				tried[number] = true
				message := text(strconv.Itoa(number))
				message.Header = &amqp.MessageHeader{Durable: true}
				receipt, err := sender.SendWithReceipt(within(), message, nil)
				if err != nil {
					return err
				}
				receipts = append(receipts, receipt)
			}
			for _, receipt := range receipts {
				state, err := receipt.Wait(within())
				if err != nil {
					return err
				}
				if _, ok := state.(*amqp.StateAccepted); !ok {
					return fmt.Errorf("outcome %v", state)
				}
			}
			for number := start; number < end; number++ {
				l.Confirmed = append(l.Confirmed, number)
			}
			if third := count / 3; start <= third && third < end {
				fmt.Println("third")
			}
		}
		return nil
	})
}

func (l *ledger) consume(uris []string, queue string, count int) {
	seen := map[int]bool{}
	keepDoing(uris, func(session *amqp.Session) error {
		receiver, err := session.NewReceiver(within(), "/queues/"+queue, &amqp.ReceiverOptions{Credit: 100})
		if err != nil {
			return err
		}
		for len(seen) < count {
			message, err := receiver.Receive(within(), nil)
			if err != nil {
				return err
			}
			number, err := strconv.Atoi(string(message.GetData()))
			check(err)
			again := 0
			if !message.Header.FirstAcquirer {
				again = 1
			}
			l.Delivered = append(l.Delivered, [2]int{number, again})
			if err = receiver.AcceptMessage(within(), message); err != nil {
				return err
			}
			seen[number] = true
		}
		return nil
	})
}

func main() {
	if os.Args[1] == "probe" {
		probes(os.Args[2], os.Args[3])
		return
	}
	uris := strings.Split(os.Args[2], ",")
	count, err := strconv.Atoi(os.Args[4])
	check(err)
	var seen ledger
	var tasks sync.WaitGroup
	tasks.Add(2)
	go func() { defer tasks.Done(); seen.publish(uris, os.Args[3], count) }()
	backwards := []string{uris[2], uris[1], uris[0]}
	go func() { defer tasks.Done(); seen.consume(backwards, os.Args[3], count) }()
	tasks.Wait()
	line, err := json.Marshal(seen)
	check(err)
	fmt.Println(string(line))
}
