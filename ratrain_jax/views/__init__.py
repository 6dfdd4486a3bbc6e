"""What is drawn of programs, timelines and measured runs. Views read these; none computes anew what they hold."""
