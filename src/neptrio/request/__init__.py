"""What passes through the server: requests, responses, tensors, their memory and their timestamps."""
