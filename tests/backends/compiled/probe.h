/* What the files of the tests' backend share. */
#include "abi.h"

void fine(error failed);                             /* what should not go wrong is fatal */
void said(char* room, size_t size, error failed);    /* the text of an error that a call must give */
void* output(object response, const char* name, int datatype, const int64_t* shape, uint32_t dims, uint64_t size);
void text_output(object response, const char* text);
void answer_text(object request, const char* text);

extern object server, manager;

void every(object instance, object request); /* every.c */
void server_says(object request, const char* what); /* server.c */
const char* shown(void);
void call(object request, const char* model, const char* how); /* calls.c */
void relay(object request);
int again(object request); /* again.c */
void count_down(object request, const char* how);
void measured(object instance, object request); /* statistics.c */
void traced(object request, const char* what); /* traces.c */
void watched(object request, const char* how); /* watched.c */
void answer_at_length(object request); /* wild.c */
void wild(object instance, object request, const char* what);
void memory(object request, const char* what); /* memory.c */
void loads(object instance, const char* how); /* concurrent.c */
void hold(object instance, object request, int milliseconds);
void meet(object instance, object request, const char* where);
void stated(object instance, object request, const char* what);
