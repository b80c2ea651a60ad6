"""What one sees first: is everything all right, what does each GPU do, what runs, what waits and why, what ended.

The page, `stoker top`, the metrics and the notifications all look at the queue through this room.
"""
