"""What flows through the house: requests, responses, tensors, their memory and their timestamps."""
