"""Plain HTTP/1.1 connections of our own."""
