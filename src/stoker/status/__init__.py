"""The state of queue, machines and GPUs at one moment, for the page, `top`, metrics and notifications."""
