"""Where time went: the trace of one request over all processes, and what each worker did lately.

Workers remember (`history`) and tell in durations (M7); a door puts those on its own clock, sends finished requests
to an OpenTelemetry collector when one is configured (`otlp`), and answers for `pdserve trace export` (`chrome`).
"""
