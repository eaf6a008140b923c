"""What the loop is offered so that it never works for long."""
