"""The performance model: chips, links and wirings to milliseconds. No torch here."""
