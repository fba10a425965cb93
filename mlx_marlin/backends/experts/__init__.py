"""What every back end has for experts: its interface, and the launches."""
