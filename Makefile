# Two commands matter to a newcomer: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Modules that are used are compiled to .pyc when they are imported first; most never are.
PIP := $(BIN)/python -m pip install --quiet --no-compile
SEEDS ?= 2000
# Processes of `make test`, 8 at most. Tests of clusters wait for most of their time: three for each
# processor of two keep both busy.
WORKERS ?= 6
LOAD ?= quorum
REPLICATION ?=
# Some containers set it; every process of a test would then compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup build collect demo demo-cdc demo-groups test test-long properties test-spark-full test-spark-delta test-capture test-rocketmq test-page page-pictures test-metrics test-procedures test-disk-full spark-jars lint types unit sim bench bench-features bench-topics bench-groups bench-spark bench-scale replication check-deploy wheel rabbitmq interop-rabbitmq clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# What compiling needs; then the other packages are installed while the modules compile.
$(VENV)/.compiles: requirements-dev.lock
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip $$(grep -E '^(Cython|setuptools)==' requirements-dev.lock)
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || $(PIP) ziglang
	touch $@

$(VENV)/.ready: $(VENV)/.compiles pyproject.toml setup.py
	$(PIP) -r requirements-dev.lock
	$(PIP) --no-build-isolation --no-deps -e .
	touch $@

setup: ## Create the environment and compile the kernels; the rest runs interpreted
	@$(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j2) $(VENV)/.ready build

build: $(VENV)/.compiles ## Compile the kernels, and what else is compiled and has changed
	@$(BIN)/python tools/build.py

demo: setup ## A three-node cluster, 336,776 real events, a killed leader, a report
	$(BIN)/python examples/demo.py

demo-cdc: setup ## A MariaDB database followed through a topic that is split, merged and moved
	-@tools/install_mariadb.sh
	$(BIN)/python examples/demo_cdc.py

demo-groups: setup ## A RocketMQ broker group whose master is killed under load, a time line, counts
	$(BIN)/python examples/demo_groups.py

test: setup ## Everything that must be green
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint types collect
	$(BIN)/python -m pytest -q -m "not long" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-long: setup ## The tests that take minutes each and have shorter siblings in make test
	$(BIN)/python -m pytest -q -m long -n $(WORKERS)

# Each process of pytest-xdist imports all tests: with nothing compiled, each would compile it.
collect: setup ## Compile all tests, beside the checks that use one processor
	@$(BIN)/python -m pytest -q --collect-only >build/collected 2>&1 || { cat build/collected; false; }

lint: setup ## Format, lint and import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: setup ## mypy --strict
	$(BIN)/mypy

sim: setup ## Run the simulator: make sim SEEDS=20000 LOAD=cluster
	$(BIN)/python -m convoymq.sim --load $(LOAD) --seeds $(SEEDS)

properties: setup ## Try the properties of unit tests with other random examples than `make test`, and more seeds
	$(BIN)/python -m pytest -q -m hypothesis --hypothesis-profile=random tests/unit
	CONVOY_TEST_SEEDS=4 $(BIN)/python -m pytest -q tests/unit/storage tests/unit/replication/ring

bench: setup ## Compare quorum, classic and mirrored queues with RabbitMQ's, in one run; compiled as releases are
	@$(BIN)/python tools/build.py --all
	$(BIN)/python benchmarks/compare.py

# Needs the network once; what is there is kept.
spark-jars: setup ## Put the newest Spark with jars of Delta Lake beside the environment's own
	$(BIN)/python tools/install_delta.py $(VENV)/spark-delta

test-spark-delta: spark-jars ## `apply` with its MERGE on executors: all its tests, and a cluster with kills
	PYTHONPATH=$(abspath $(VENV))/spark-delta $(BIN)/python -m pytest -q tests/spark/test_apply.py \
		tests/spark/test_merging.py tests/spark/test_topics.py tests/spark/test_merge_cluster.py

bench-spark: setup ## Compare the Spark data sources with Spark's own Parquet
	-@$(BIN)/python tools/install_delta.py $(VENV)/spark-delta
	@$(BIN)/python tools/build.py --all
	$(BIN)/python benchmarks/spark.py

test-spark-full: setup ## The kills of the Spark tests once at full size: 342,000 rows and more
	CONVOY_SPARK_FAULT_SCALE=180 $(BIN)/python -m pytest -q tests/spark -k "killed or executor or values_of_a_schema"

test-capture: setup ## `convoy pipeline capture` with a real MariaDB, which is installed if it is missing
	@tools/install_mariadb.sh
	$(BIN)/python -m pytest -q tests/unit/capture tests/interop/test_capture_types.py \
		tests/faults/test_capture.py tests/faults/test_capture_statements.py tests/spark/test_capture.py

test-rocketmq: setup ## Name server and broker with RocketMQ's own brokers, clients (Java, Go, Node) and tools, whose jars are installed
	@tools/install_rocketmq.sh
	$(BIN)/python -m pytest -q tests/rocketmq

test-amqp10: setup ## AMQP 1.0 with six clients in Python, Java, Node and Go, which are installed (Proton is compiled)
	@tools/install_amqp10.sh $(abspath $(BIN))/python
	CONVOY_TEST_CLIENTS=amqp10 $(BIN)/python -m pytest -q -rs tests/interop/amqp10 tests/unit/edges/amqp10 tests/unit/messages/amqp10

test-page: setup ## The management page in Chromium, which is installed with Playwright and axe-core; before three nodes
	tools/install_browser.sh $(BIN)
	$(BIN)/python -m pytest -q tests/page tests/unit/edges/http/test_page.py

page-pictures: setup ## Make the pictures of docs/page.md again, of three nodes at work
	tools/install_browser.sh $(BIN)
	$(BIN)/python -m tests.page.pictures docs/images

test-metrics: setup ## Dashboard and alerts in a real Prometheus, which is installed, before three nodes
	tools/install_prometheus.sh
	$(BIN)/python -m pytest -q -rs tests/faults/test_prometheus.py

test-procedures: setup ## Carry out docs/procedures.md on three nodes under load
	CONVOY_TEST_PROCEDURES=1 $(BIN)/python -m pytest -q tests/faults/test_procedures.py

bench-groups: setup ## Broker groups beside RocketMQ's own broker, in one run, with its Java client
	@tools/install_rocketmq.sh
	@$(BIN)/python tools/build.py --all
	$(BIN)/python -m benchmarks.groups

test-disk-full: setup ## One unacknowledged message while ten million others pass: the disk does not grow
	CONVOY_HELD_MESSAGES=10000000 $(BIN)/python -m pytest -q tests/faults/test_disk_space.py -k held

bench-features: setup ## What features of quorum queues cost, beside the plain queue
	@$(BIN)/python tools/build.py --all
	$(BIN)/python benchmarks/features.py

bench-topics: setup ## Ordered topics beside plain streams, and what changes of partitions cost
	@$(BIN)/python tools/build.py --all
	$(BIN)/python benchmarks/topics.py

bench-scale: setup ## Processor time a message of one process and of two, and what many queues cost: docs/scale.md
	@$(BIN)/python tools/build.py --all
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/many_queues.py --queues 4000
	$(BIN)/python benchmarks/many_queues.py --queues 10000 --nodes 1

replication: setup ## Drive queues and broker groups through the same faults: docs/replication.md
	$(BIN)/python -m benchmarks.replication $(REPLICATION)

check-deploy: setup ## Image, Debian package and Helm chart in clean roots; needs root, mmdebstrap and Helm
	@$(BIN)/python -m pip install --quiet pyyaml kubernetes-validate
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/check_deploy.py

wheel: setup ## Build both wheels and try them in environments of their own, without sources or compiler
	tools/check_wheel.sh

rabbitmq: ## Install Debian's RabbitMQ, to compare with
	tools/install_rabbitmq.sh

interop-rabbitmq: setup ## Run the interop tests against RabbitMQ: they must test AMQP, not ConvoyMQ
	CONVOY_TEST_SYSTEM=rabbitmq $(BIN)/python -m pytest -q tests/interop

clean: ## Remove what was built
	rm -rf build $(VENV) src/*.egg-info
	find src -name '*.so' -delete
