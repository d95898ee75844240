"""The five agents. Each module is one agent; `python -m examples.customer_service.agents NAME` serves one."""
