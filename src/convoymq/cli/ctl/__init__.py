"""RabbitMQ's command line tools: `convoy ctl`, `queues`, `diagnostics` and `upgrade`.

A command is a row of a table: name, arguments, request, banner, columns (`command`). Each module
of a subject has its rows; `tools` joins them, `main` runs one. See docs/tools.md.
"""
