"""Programs that measure, each with its data: JSON lines."""
