"""`ladder explore`: what the performance model says of a deployment, as a page to choose in. No torch here."""
