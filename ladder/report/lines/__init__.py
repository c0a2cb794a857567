"""The lines that a report is made of: read, checked, and told apart by kind. No torch here."""
