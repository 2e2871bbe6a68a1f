"""Ready pipelines: archive messages, apply changes to tables. The audit is `convoymq.spark.audit`.

Each is a function over a Spark session and a command (`convoy pipeline NAME`), resumable from its
checkpoint.
"""
